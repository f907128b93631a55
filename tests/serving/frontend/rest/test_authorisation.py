import pytest

from torchere.serving.frontend.rest.authorisation import required_key

INFERENCE, MANAGEMENT, METRICS = frozenset({"inference"}), frozenset({"management"}), frozenset({"metrics"})
SHARED = INFERENCE | MANAGEMENT | METRICS


@pytest.mark.parametrize("surfaces", [INFERENCE, MANAGEMENT, SHARED])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("OPTIONS", "/"),
        ("GET", "/api-description"),
        ("GET", "/livez"),
        ("GET", "/readyz"),
        ("GET", "/startupz"),
        ("GET", "/readyz/m/1.0"),
    ],
)
def test_descriptions_and_probes_are_free(surfaces, method, path):
    assert required_key(surfaces, method, path) is None


@pytest.mark.parametrize("path", ["/ping", "/predictions/m", "/", "/nope", "/metrics", "/token", "/models"])
def test_everything_else_on_the_inference_port_needs_its_key(path):
    assert required_key(INFERENCE, "GET", path) == "inference"


@pytest.mark.parametrize("path", ["/models", "/models/m", "/", "/nope", "/tokens", "/workflows", "/ping"])
def test_everything_else_on_the_management_port_needs_its_key(path):
    assert required_key(MANAGEMENT, "GET", path) == "management"


@pytest.mark.parametrize("surfaces", [INFERENCE, MANAGEMENT, SHARED])
@pytest.mark.parametrize("path", ["/models", "/predictions/m", "/nope"])
def test_options_is_free_for_the_description_alone(surfaces, path):
    assert required_key(surfaces, "OPTIONS", path) == required_key(surfaces, "GET", path) is not None


def test_the_token_api_checks_the_api_key_itself():
    assert required_key(MANAGEMENT, "GET", "/token") is None


@pytest.mark.parametrize("path", ["/metrics", "/metrics/x", "/", "/nope"])
def test_the_metrics_port_needs_no_key(path):
    assert required_key(METRICS, "GET", path) is None


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
    assert required_key(SHARED, "GET", path) == kind
