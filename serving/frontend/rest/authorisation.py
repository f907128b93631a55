"""The one place that says which key a request needs, for every route of every listener. Pure."""

from __future__ import annotations

from typing import Literal

from torchere.serving.access.keys import KeyKind
from torchere.serving.frontend.rest.targets import prediction_target

Surface = Literal["inference", "management", "metrics"]
Surfaces = frozenset[Surface]

PROBES = frozenset({"/livez", "/readyz", "/startupz"})
MODEL_PROBES = "/readyz/"  # then a model, and its version
_MANAGEMENT_ROOMS = frozenset({"models", "workflows", "log-level"})
_REPOSITORY = "/v2/repository/"


def is_metrics_path(path: str) -> bool:
    """Whether a path asks for the metrics: `/metrics`, with anything below it."""
    return path == "/metrics" or path.startswith("/metrics/")


def is_probe(path: str) -> bool:
    """Whether a path asks how the server, or a model of it, is."""
    return path in PROBES or path.startswith(MODEL_PROBES)


def required_key(surfaces: Surfaces, method: str, path: str) -> KeyKind | None:
    """Return the kind of key that a request needs; None when it needs none.

    Free for all are the probes, the API description, the metrics where they are served, and `/token`, which
    checks the API key itself. All else needs the key of its API, whether the path exists or not. A shared
    listener asks for one key, by the path. (TorchServe asks there for both, and nothing passes.)

    Args:
        surfaces: the APIs that the listener answers.
        method: HTTP method.
        path: percent-decoded, without trailing slashes except for "/"; "*" of `OPTIONS *`.
    """
    if is_probe(path) or path == "/api-description" or (path == "/" and method == "OPTIONS"):
        return None
    if "metrics" in surfaces and (len(surfaces) == 1 or is_metrics_path(path)):
        return None
    if "management" not in surfaces:
        return "inference"
    if path == "/token":
        return None
    if "inference" not in surfaces:
        return "management"
    is_managing = path.startswith(_REPOSITORY) or (
        path.removeprefix("/").partition("/")[0] in _MANAGEMENT_ROOMS and prediction_target(path) is None
    )
    return "management" if is_managing else "inference"
