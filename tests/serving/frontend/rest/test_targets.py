import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.frontend.rest.targets import (
    EXPLAIN_NO,
    EXPLAIN_YES,
    Target,
    prediction_target,
)

NO_PATH = (("url_path", ""), *EXPLAIN_NO)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/predictions/m", Target("m", None, NO_PATH)),
        ("/predictions/m/", Target("m", None, NO_PATH)),
        ("/predictions/m/1.0", Target("m", "1.0", NO_PATH)),
        ("/predictions/m/1.0/a/b", Target("m", "1.0", (("url_path", "a/b"), *EXPLAIN_NO))),
        ("/explanations/m", Target("m", None, (("url_path", ""), *EXPLAIN_YES))),
        ("/v1/models/m:predict", Target("m", None, EXPLAIN_NO, speaks_json=True)),
        ("/v1/models/m:explain", Target("m", None, EXPLAIN_YES, speaks_json=True)),
        ("/v1/models/m:1:explain:predict", Target("m", None, EXPLAIN_NO, speaks_json=True)),
        ("/v2/models/m/infer", Target("m", None, EXPLAIN_NO, verb="infer", speaks_json=True)),
        ("/v2/models/m/versions/1/infer", Target("m", "1", EXPLAIN_NO, verb="infer", speaks_json=True)),
        ("/v2/models/m/generate", Target("m", None, EXPLAIN_NO, verb="generate", speaks_json=True)),
        (
            "/v2/models/m/versions/1/generate_stream",
            Target("m", "1", EXPLAIN_NO, verb="generate_stream", speaks_json=True),
        ),
        ("/v2/models/m/explain", Target("m", None, EXPLAIN_YES, speaks_json=True)),
        ("/invocations", Target(None, takes_query=True)),
        ("/models/m/invoke", Target("m", takes_query=True)),
        ("/m/predict", Target("m", takes_query=True)),
        ("/m/1.0/predict", Target("m", "1.0", takes_query=True)),
    ],
)
def test_prediction_paths_name_their_target(path, target):
    found = prediction_target(path)
    assert found is not None
    assert found._replace(route="") == target


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "",
            "/predictions",
            "/predictions/",
            "/explanations",
            "/ping",
            "/metrics",
            "/models",
            "/models/m",
        ),
        *("/models/m/1.0", "/models/m/1.0/set-default", "/v1/models/m", "/v1/models", "/v2", "/v2/models/m"),
        *(
            "/v2/health/ready",
            "/v2/models/m/versions/1",
            "/v2/models/m/ready",
            "/v2/models/m/versions/1/explain",
        ),
        *("/v2/models/m/infer/more", "/ping/predict", "/models/predict"),
        *("/v2/repository/m/infer", "/v1/repository/m:predict", "/v1/models/m:predict/more"),
        *("/predictions/m//x", "/explanations/m//x", "/m//predict", "/v2/models/m/versions//infer"),
        *("/a/b/c/predict", "/predict", "/m/predict/more", "/invocations/more", "/v1/models/m:other"),
    ],
)
def test_other_paths_are_none(path):
    assert prediction_target(path) is None


@pytest.mark.parametrize(
    ("path", "group"),
    [("/predictions/m", ""), ("/explanations/m", "explain"), ("/v1/models/m:explain", "explain")],
)
def test_only_explanations_are_not_batched_with_predictions(path, group):
    target = prediction_target(path)
    assert target is not None
    assert target.group == group


@given(st.text(alphabet="/:predictonsmv12model", max_size=40))
def test_any_path_gets_an_answer(path):
    target = prediction_target("/" + path)
    assert target is None or isinstance(target, Target)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/predictions/a", "/predictions/{model}"),
        ("/predictions/predictions/1.0", "/predictions/{model}/{version}"),
        ("/explanations/a/2/x/y", "/explanations/{model}/{version}/{url_path}"),
        ("/v1/models/a:predict", "/v1/models/{model}:predict"),
        ("/v2/models/a/versions/1/infer", "/v2/models/{model}/versions/{version}/infer"),
        ("/v2/models/models/generate", "/v2/models/{model}/generate"),
        ("/models/a/invoke", "/models/{model}/invoke"),
        ("/a/1/predict", "/{model}/{version}/predict"),
        ("/invocations", "/invocations"),
    ],
)
def test_a_route_has_no_names_of_clients(path, route):
    target = prediction_target(path)
    assert target is not None
    assert target.route == route
