"""Parser of prediction paths: model, version and protocol. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, cast

Pairs = tuple[tuple[str, str], ...]
Verb: TypeAlias = Literal["", "infer", "generate", "generate_stream"]

EXPLAIN_NO: Pairs = (("explain", "False"),)
EXPLAIN_YES: Pairs = (("explain", "True"),)


class Target(NamedTuple):
    """A parsed prediction path."""

    model: str | None = None  # None: named by the query or a form field, or the sole startup model
    version: str | None = None  # None: the default version
    headers: Pairs = ()  # headers for the handler, in addition to the client's
    takes_query: bool = False  # query parameters are passed to the handler too
    verb: Verb = ""  # of the Open Inference Protocol; "": another protocol's path
    speaks_json: bool = False  # a path of KServe, whose servers take any body for JSON
    route: str = ""  # the path without the client's names, for spans

    @property
    def group(self) -> str:
        """Batch group: explanations and predictions call the handler differently, so they share no batch."""
        return "explain" if EXPLAIN_YES[0] in self.headers else ""


_QUERY = Target(takes_query=True)
_KSERVE = Target(headers=EXPLAIN_NO, speaks_json=True)
_KSERVE_EXPLAIN = Target(headers=EXPLAIN_YES, speaks_json=True)
# TorchServe's path of a model, a version, and a rest for the handler.
_NAMED = r"(?P<model>[^/]*)(?:/(?P<version>[^/]*)(?:/(?P<url_path>.*))?)?"
_V2_VERSION = r"/v2/models/(?P<model>[^/]*)(?:/versions/(?P<version>[^/]*))?"
# First segments with another meaning: a model with such a name can't be reached by `/{model}/predict`.
_RESERVED = (
    "predictions|explanations|invocations|wfpredict|ping|api-description"  # inference
    "|models|workflows|token|v1|v2"  # management and KServe
    "|metrics|livez|readyz|startupz"
)
# The first pattern that matches counts. Each takes time in proportion to the length of the path.
_PATTERNS = [
    (re.compile(pattern, re.DOTALL), target)
    for pattern, target in (
        (f"/predictions/{_NAMED}", Target(headers=EXPLAIN_NO)),
        (f"/explanations/{_NAMED}", Target(headers=EXPLAIN_YES)),
        (r"/v1/models/(?P<model>[^/:]*)(?=:)(?=[^/]*:predict)[^/]*", _KSERVE),
        (r"/v1/models/(?P<model>[^/:]*)(?=:)(?=[^/]*:explain)[^/]*", _KSERVE_EXPLAIN),
        (f"{_V2_VERSION}/(?P<verb>infer|generate|generate_stream)", _KSERVE),
        (r"/v2/models/(?P<model>[^/]*)/explain", _KSERVE_EXPLAIN),
        (r"/invocations", _QUERY),
        (r"/models/(?P<model>[^/]*)/invoke", _QUERY),
        (rf"/(?!(?:{_RESERVED})/)(?P<model>[^/]*)(?:/(?P<version>[^/]*))?/predict", _QUERY),
    )
]


@lru_cache(maxsize=1024)  # clients use few paths, and every request looks one up
def prediction_target(path: str) -> Target | None:
    """Return the target of a percent-decoded path; None if it is not a prediction path."""
    path = path.rstrip("/")
    for pattern, target in _PATTERNS:
        if found := pattern.fullmatch(path):
            return _filled(target, found)
    return None


def _filled(target: Target, found: re.Match[str]) -> Target | None:
    named = found.groupdict()
    version = named.get("version")
    if version == "":  # it does not mean the default version
        return None
    url_path = (("url_path", named["url_path"] or ""),) if "url_path" in named else ()
    route = found.string
    for name in reversed([*found.re.groupindex]):
        if found[name] is not None and name != "verb":
            route = f"{route[: found.start(name)]}{{{name}}}{route[found.end(name) :]}"
    return target._replace(
        model=named.get("model"),
        version=version,
        headers=url_path + target.headers,
        verb=cast("Verb", named.get("verb", "")),
        route=route,
    )
