"""The key that each request needs, for every route of every REST listener. Pure."""

from __future__ import annotations

from typing import Literal

from torchere.serving.access.identity import Role
from torchere.serving.frontend.rest.targets import prediction_target

Surface = Literal["inference", "management", "metrics"]
Surfaces = frozenset[Surface]

PROBES = frozenset({"/livez", "/readyz", "/startupz"})
MODEL_PROBES = "/readyz/"  # then a model, and its version
_MANAGEMENT_ROOMS = frozenset({"models", "workflows", "log-level"})
_REPOSITORY = "/v2/repository/"


def is_metrics_path(path: str) -> bool:
    """Tell whether a path is `/metrics` or below it."""
    return path == "/metrics" or path.startswith("/metrics/")


def is_probe(path: str) -> bool:
    """Tell whether a path is that of a probe of the server or of a model."""
    return path in PROBES or path.startswith(MODEL_PROBES)


def required_key(surfaces: Surfaces, method: str, path: str) -> Role | None:
    """Return the kind of key that a request needs; None when it needs none.

    No key is needed for the probes, the API description, the metrics where they are served, and `/token`,
    which checks the API key itself. All other paths need the key of their API, even if they do not exist. On
    a shared listener the path decides which key is needed. (TorchServe requires both keys there, so no
    request passes.)

    Args:
        surfaces: the APIs that the listener serves.
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
