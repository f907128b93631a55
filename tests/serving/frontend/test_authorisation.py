"""The table of authorisation: it has a row for every route, and nothing is open without one that says so."""

from typing import Any

import pytest

from torchere.serving.config.server_settings import Address
from torchere.serving.frontend.authorisation import (
    API_KEY,
    PAGE,
    PREDICTIONS,
    TABLE,
    RestPort,
    grpc_rows,
    named_model,
)
from torchere.serving.frontend.grpc.server import inference_server, management_server
from torchere.serving.frontend.rest.routes import routes

INFERENCE, MANAGEMENT, METRICS = frozenset({"inference"}), frozenset({"management"}), frozenset({"metrics"})
SHARED = INFERENCE | MANAGEMENT | METRICS
# Routes for paths that do not exist; the last one answers OPTIONS on the paths of predictions.
WITHOUT_ROUTE = {"/models/{rest:path}", "/workflows/{rest:path}", "/log-level/{rest:path}"}
ALL_PATHS = "/{path:path}"


def required_key(surfaces, path, **settings):
    port = RestPort(surfaces, authorizes=True, **settings)
    return port.role(port.row(path))


def flat(routes):
    """The routes of an app and of the routers in it; the framework keeps either form."""
    for route in routes:
        router = getattr(route, "original_router", None)
        yield from [route] if router is None else flat(router.routes)


def rest_routes(planes, surfaces):
    """Path and method of every route of a port with these APIs."""
    app: Any = routes(surfaces, planes.data, planes.control, planes.services(keys=planes.keys))
    # The connection strips slashes at the end of a path.
    found = {(route.path.rstrip("/") or "/", way) for route in flat(app.routes) for way in route.methods}
    assert len(found) > 10
    return {(path, method) for path, method in found if path != ALL_PATHS}


@pytest.mark.parametrize("surfaces", [INFERENCE, MANAGEMENT, METRICS, SHARED])
def test_every_route_of_a_rest_port_has_a_row(planes, surfaces):
    rows = [row for row in TABLE if row.transport == "rest" and row.port in (None, *surfaces)]
    assert {path for path, _ in rest_routes(planes, surfaces)} - {row.route for row in rows} == set()


@pytest.mark.parametrize("surfaces", [INFERENCE, MANAGEMENT, SHARED])
def test_a_request_gets_the_row_of_the_route_that_answers_it(planes, surfaces):
    port = RestPort(surfaces, authorizes=True)
    found = {route: port.row(filled(route)).route for route, _ in rest_routes(planes, surfaces)}
    assert {route: row for route, row in found.items() if row != route} == {}


def filled(route):
    """A path of the route, as a client writes it."""
    plain = route.replace("{first:wfpredict}", "WfPredict").replace(":path", "")
    return plain.replace("{", "a-").replace("}", "")


@pytest.mark.parametrize(
    ("start", "port"), [(inference_server, "inference"), (management_server, "management")]
)
def test_every_method_of_a_grpc_port_has_a_row(planes, start, port):
    server = start(planes.data, planes.control, planes.services(keys=planes.keys), Address(port=0))
    assert server.methods == set(grpc_rows(port))


def test_no_row_is_for_a_route_that_is_gone(planes):
    served = {
        route for surfaces in (INFERENCE, MANAGEMENT, METRICS) for route, _ in rest_routes(planes, surfaces)
    }
    rows = {row.route for row in TABLE if row.transport == "rest"}
    assert rows - served == WITHOUT_ROUTE | {PREDICTIONS, PAGE}


def test_only_these_routes_are_for_every_client():
    free = {row.route for row in TABLE if row.needs is None}
    health = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    health |= {"/v2/health/live", "/v2/health/ready"}
    for service in ("inference", "org.pytorch.serve.grpc.openinference"):
        health |= {f"/{service}.GRPCInferenceService/{method}" for method in ("ServerLive", "ServerReady")}
    probes = {"/livez", "/startupz", "/readyz", "/readyz/{model}", "/readyz/{model}/{version}"}
    assert free == probes | health | {"/api-description", "/", PAGE}
    assert {row.route for row in TABLE if row.needs == API_KEY} == {"/token"}


def test_every_change_of_a_route_of_management_has_the_name_of_an_action():
    changing = {"POST", "PUT", "DELETE"}
    silent = {"/v2/repository/index", "/v1/models/{model}"}
    named = {row.route for row in TABLE if row.actions}
    managing = {row.route for row in TABLE if row.needs == "management" and row.transport == "rest"}
    assert managing - named == silent | {"/v2/repository/{rest:path}"} | WITHOUT_ROUTE
    assert all(set(row.actions) <= {*changing, "*"} for row in TABLE)


@pytest.mark.parametrize(
    ("route", "path", "named"),
    [
        ("/models/{model}/{version}", "/models/net/1.0", ("net", "1.0")),
        ("/models/{model}", "/models/net", ("net", "")),
        ("/models", "/models", ("", "")),
        ("/v2/repository/models/{model}/load", "/v2/repository/models/a b/load", ("a b", "")),
        ("/models/{model}", "/other", ("", "")),
        ("/workflows/{workflow}", "/workflows/graph", ("graph", "")),
    ],
)
def test_the_path_names_the_model_that_is_managed(route, path, named):
    assert named_model(route, path) == named


@pytest.mark.parametrize("surfaces", [INFERENCE, MANAGEMENT, SHARED])
@pytest.mark.parametrize("path", ["/", "/api-description", "/livez", "/readyz", "/startupz", "/readyz/m/1.0"])
def test_descriptions_and_probes_are_free(surfaces, path):
    assert required_key(surfaces, path) is None


@pytest.mark.parametrize("surfaces", [INFERENCE, SHARED])
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_probes_of_the_protocol_are_free_where_it_is_served(surfaces, path):
    assert required_key(surfaces, path) is None
    assert required_key(MANAGEMENT, path) == "management"


@pytest.mark.parametrize("path", ["/ping", "/predictions/m", "/nope", "/metrics", "/token", "/models"])
def test_everything_else_on_the_inference_port_needs_its_key(path):
    assert required_key(INFERENCE, path) == "inference"


@pytest.mark.parametrize("path", ["/models", "/models/m", "/nope", "/tokens", "/workflows", "/ping"])
def test_everything_else_on_the_management_port_needs_its_key(path):
    assert required_key(MANAGEMENT, path) == "management"


def test_the_token_api_checks_the_api_key_itself():
    assert required_key(MANAGEMENT, "/token") is None


@pytest.mark.parametrize("path", ["/metrics", "/metrics/x", "/nope"])
def test_the_metrics_port_needs_its_role_only_if_a_setting_says_so(path):
    assert required_key(METRICS, path) is None
    assert required_key(METRICS, path, asks_for_metrics=True) == "metrics"
    assert required_key(METRICS, "/api-description", asks_for_metrics=True) is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *[("/predictions/m", "inference"), ("/ping", "inference"), ("/m/predict", "inference")],
        *[("/models/m/invoke", "inference"), ("/v1/models/m:predict", "inference"), ("/nope", "inference")],
        *[("/models", "management"), ("/models/m/1.0", "management"), ("/workflows", "management")],
        *[("/v1/models/m", "inference"), ("/metrics", None), ("/token", None)],
        *[("/v2/repository/models/m/load", "management"), ("/v2/models/m/infer", "inference")],
        *[("/metrics/x", None), ("/metricsx", "inference"), ("*", "inference")],
    ],
)
def test_a_shared_port_asks_for_the_key_of_the_api_that_answers(path, kind):
    assert required_key(SHARED, path) == kind
