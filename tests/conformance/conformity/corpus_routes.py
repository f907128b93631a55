"""Routes and methods of the three REST listeners, beside the ordinary way to use them."""

from __future__ import annotations

from collections.abc import Iterator

from conformity.rest import Case

JSON = {"Content-Type": "application/json"}
ROW = b'{"a": 1}'
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")

# Every method is tried on these ...
INFERENCE_ROUTES = (
    "/",
    "/ping",
    "/predictions/probe",
    "/explanations/probe",
    "/invocations?model_name=probe",
    "/models/probe/invoke",
    "/probe/predict",
    "/v1/models/probe:predict",
    "/v2/models/probe/infer",
)
MANAGEMENT_ROUTES = ("/", "/models", "/models/probe", "/models/probe/1.0", "/v1/models/probe")
# ... but not these, which change what is served.
CHANGING = {
    ("POST", "/models"),
    ("DELETE", "/models/probe"),
    ("DELETE", "/models/probe/1.0"),
    ("PUT", "/models/probe"),
    ("PUT", "/models/probe/1.0"),
}

# The rest is asked with GET and with POST.
INFERENCE_PATHS = (
    "/ping/",
    "/ping/more",
    "/PING",
    "/ping?a=1",
    "/predictions",
    "/predictions/",
    "/Predictions/probe",
    "/predictions/probe/",
    "/predictions/probe?a=1",
    "/predictions/probe/1.0",
    "/predictions/probe/1.0/",
    "/predictions/probe/1.0/extra/path",
    "/predictions/probe/9.9",
    "/predictions/probe/9.9/extra",
    "/predictions/pro%62e",
    "/predictions/probe%2F1.0",
    "/predictions//probe",
    "//predictions/probe",
    "/predictions/none",
    "/predictions/n%C3%A9ant",
    "/predictions/%20",
    "/explanations",
    "/explanations/probe/1.0",
    "/explanations/probe/1.0/extra",
    "/explanations/none",
    "/explanations/probe/9.9",
    "/v1/models/probe",
    "/v1/models/probe:explain",
    "/v1/models/probe:nothing",
    "/v1/models/none:predict",
    "/v1/models/probe:predict/extra",
    "/v1/models",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/probe",
    "/v2/models/probe/ready",
    "/v2/models/probe/explain",
    "/v2/models/none/infer",
    "/v2/models/probe/versions/1.0/infer",
    "/v2/models/probe/infer/extra",
    "/models",
    "/models/probe",
    "/models/none/invoke",
    "/models/probe/invoke/extra",
    "/models/probe/1.0/invoke",
    "/probe/1.0/predict",
    "/probe/9.9/predict",
    "/none/predict",
    "/probe/predict/extra",
    "/probe",
    "/predict",
    "/wfpredict",
    "/wfpredict/none",
    "/WFPREDICT/none",
    "/metrics",
    "/api-description",
    "/api-description/more",
    "/token",
    "/workflows",
    "/favicon.ico",
)
MANAGEMENT_PATHS = (
    "/ping",
    "/predictions/probe",
    "/models/",
    "/models/none",
    "/models/probe/9.9",
    "/models/probe/all",
    "/models/none/all",
    "/models/none/1.0",
    "/models/probe/1.0/more",
    "/models/probe/1.0/set-default",
    "/models/probe/1.0/set-default/more",
    "/models?limit=1",
    "/v1/models/none",
    "/v1/models",
    "/v1/models/probe/more",
    "/v2",
    "/metrics",
    "/api-description",
    "/token?type=inference",
    "/workflows",
    "/workflows/none",
    "/workflows/none/more",
    "/nothing",
)
METRICS_PATHS = ("/", "/ping", "/metrics/more", "/metrics?name[]=nothing", "/api-description", "/nothing")


def route_cases() -> Iterator[Case]:
    """Every route with every method, and odd paths with two of them."""
    for route in INFERENCE_ROUTES:
        yield from (_case("inference", method, route) for method in METHODS)
    for path in INFERENCE_PATHS:
        yield from (_case("inference", method, path) for method in ("GET", "POST"))
    for route in MANAGEMENT_ROUTES:
        yield from (_case("management", m, route) for m in METHODS if (m, route) not in CHANGING)
    for path in MANAGEMENT_PATHS:
        yield from (_case("management", m, path) for m in ("GET", "DELETE") if not _changes(m, path))
    for path in METRICS_PATHS:
        yield from (_case("metrics", method, path) for method in ("GET", "POST", "OPTIONS"))


def _changes(method: str, path: str) -> bool:
    return method == "DELETE" and path.startswith("/models/probe/1.0")


def _case(api: str, method: str, path: str) -> Case:
    has_body = api == "inference" and method in ("POST", "PUT", "PATCH")
    return Case(
        f"{api}: {method} {path}", method, path, api, JSON if has_body else {}, ROW if has_body else None
    )
