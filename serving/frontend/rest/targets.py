"""Parser of prediction paths: model, version and protocol. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

Pairs = tuple[tuple[str, str], ...]
Verb: TypeAlias = Literal["", "infer", "generate", "generate_stream"]

EXPLAIN_NO: Pairs = (("explain", "False"),)
EXPLAIN_YES: Pairs = (("explain", "True"),)

# First segments with another meaning: a model with such a name can't be reached by `/{model}/predict`.
_RESERVED = frozenset(
    {"predictions", "explanations", "invocations", "wfpredict", "ping", "api-description"}  # inference
    | {"models", "workflows", "token", "v1", "v2"}  # management and KServe
    | {"metrics", "livez", "readyz", "startupz"}
)

_VERBS: dict[str, Verb] = {"infer": "infer", "generate": "generate", "generate_stream": "generate_stream"}


class Target(NamedTuple):
    """A parsed prediction path."""

    model: str | None  # None: named in the query or a form field, or the sole startup model (`/invocations`)
    version: str | None = None  # None: the default version
    headers: Pairs = ()  # headers for the handler, in addition to the client's
    takes_query: bool = False  # query parameters are passed to the handler too
    verb: Verb = ""  # of the Open Inference Protocol; "": another protocol's path
    speaks_json: bool = False  # a path of KServe, whose servers take any body for JSON

    @property
    def group(self) -> str:
        """Batch group: explanations and predictions call the handler differently, so they share no batch."""
        return "explain" if EXPLAIN_YES[0] in self.headers else ""


@lru_cache(maxsize=1024)  # clients use few paths, and every request looks one up
def prediction_target(path: str) -> Target | None:
    """Return the target of a percent-decoded path; None if it is not a prediction path."""
    segments = path.rstrip("/").split("/")[1:]
    target = _target(segments) if segments else None
    return None if target is None or target.version == "" else target  # an empty version is not the default


def route_of(path: str, target: Target) -> str:
    """Return a prediction path without the client's names, for spans.

    >>> path = "/v2/models/m/versions/1/infer"
    >>> route_of(path, prediction_target(path))
    '/v2/models/{model}/versions/{version}/infer'
    """
    segments = path.rstrip("/").split("/")[1:]
    if target.model is None:
        return path
    at = 2 if segments[0] in ("v1", "v2") else 1 if segments[0] in _RESERVED else 0
    verb = segments[at].partition(":")[2] if segments[0] == "v1" else ""
    segments[at] = f"{{model}}:{verb}" if verb else "{model}"
    if target.version is not None:
        segments[segments.index(target.version, at + 1)] = "{version}"
    if segments[0] in ("predictions", "explanations") and len(segments) > 3:
        segments[3:] = ["{url_path}"]
    return "/" + "/".join(segments)


def _target(segments: list[str]) -> Target | None:
    first = segments[0]
    if first == "predictions":
        return _named(segments, EXPLAIN_NO)
    if first == "explanations":
        return _named(segments, EXPLAIN_YES)
    if first in ("v1", "v2"):
        kserve = _kserve(segments)
        return None if kserve is None else kserve._replace(speaks_json=True)
    return _query_style(segments)


def _named(segments: list[str], explain: Pairs) -> Target | None:
    if len(segments) < 2:
        return None
    version = segments[2] if len(segments) > 2 else None
    return Target(segments[1], version, (("url_path", "/".join(segments[3:])), *explain))


def _kserve(segments: list[str]) -> Target | None:
    if len(segments) < 3 or segments[1] != "models":
        return None
    if segments[0] == "v2":
        return _open_inference(segments[2], segments[3:])
    model = segments[2].partition(":")[0]
    if len(segments) > 3:
        return None
    if ":predict" in segments[2]:
        return Target(model, headers=EXPLAIN_NO)
    return Target(model, headers=EXPLAIN_YES) if ":explain" in segments[2] else None


def _open_inference(model: str, rest: list[str]) -> Target | None:
    version = None
    if len(rest) == 3 and rest[0] == "versions":
        version, rest = rest[1], rest[2:]
    if len(rest) != 1:
        return None
    verb = _VERBS.get(rest[0])
    if verb is not None:
        return Target(model, version, EXPLAIN_NO, verb=verb)
    return Target(model, headers=EXPLAIN_YES) if rest[0] == "explain" and version is None else None


def _query_style(segments: list[str]) -> Target | None:
    if segments == ["invocations"]:
        return Target(None, takes_query=True)
    if segments[0] == "models":
        is_invoke = len(segments) == 3 and segments[2] == "invoke"
        return Target(segments[1], takes_query=True) if is_invoke else None
    if segments[-1] != "predict" or segments[0] in _RESERVED or not 2 <= len(segments) <= 3:
        return None
    return Target(segments[0], segments[1] if len(segments) == 3 else None, takes_query=True)
