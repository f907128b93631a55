"""The table of authorisation: the role that each route of each port needs, and the change it makes. Pure.

Both transports use only this table. A route without a row needs the role of its port, so that a forgotten row
never gives wider access.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from torchere.serving.access.identity import Role
from torchere.serving.frontend.rest.targets import prediction_target

Surfaces = frozenset[Role]  # the APIs that a port serves
Transport = Literal["rest", "grpc"]
# `API_KEY`: the route itself checks the API key of TorchServe's key file. None: any client may call it.
API_KEY: Literal["api key"] = "api key"
Need = Role | Literal["api key"] | None

PREDICTIONS = "(predictions)"  # every path of `targets.py`
PAGE = "(page)"  # `/` for a browser: `rest/page.py`
ANY_METHOD = "*"


class Row(NamedTuple):
    """One route."""

    transport: Transport  # the protocol of its clients
    port: Role | None  # the API whose ports have the route; None: all ports
    needs: Need  # the role of the clients that may call it
    route: str  # its path in the framework's notation, or `/package.Service/Method` of gRPC
    actions: Mapping[str, str]  # its audited changes, by HTTP method; `ANY_METHOD`: of every method

    def action(self, method: str) -> str:
        """Return the name of the change that a call makes; "" if it only reads."""
        return self.actions.get(method, self.actions.get(ANY_METHOD, ""))

    @property
    def is_charged(self) -> bool:
        """Whether a request counts toward the rate limit of its client; see `access/client_limits.py`."""
        return self.needs == "inference" and self.route not in HEALTH_ROUTES


def _rest(port: Role | None, needs: Need, *routes: str, **actions: str) -> Iterator[Row]:
    return (Row("rest", port, needs, route, actions) for route in routes)


def _grpc(port: Role, needs: Need, service: str, *methods: str, action: str = "") -> Iterator[Row]:
    actions = {ANY_METHOD: action} if action else {}
    return (Row("grpc", port, needs, f"/{service}/{method}", actions) for method in methods)


def _protocol(service: str) -> Iterator[Row]:
    """Yield the rows of the Open Inference Protocol's service under one of its names."""
    of_models = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
    yield from _grpc("inference", None, service, "ServerLive", "ServerReady")
    yield from _grpc("inference", "inference", service, "ServerMetadata", *of_models)
    yield from _grpc("inference", "inference", service, "ModelInfer", "ModelStreamInfer")
    yield from _grpc("inference", "management", service, "RepositoryIndex")
    yield from _grpc("inference", "management", service, "RepositoryModelLoad", action="load")
    yield from _grpc("inference", "management", service, "RepositoryModelUnload", action="unload")


_VERSION = "/models/{model}/{version}"
_V2_MODEL, _V2_VERSION = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
_HEALTH = "grpc.health.v1.Health"
_REFLECTION = tuple(f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha"))
_TORCHSERVE = "org.pytorch.serve.grpc"
_INFERENCE = f"{_TORCHSERVE}.inference.InferenceAPIsService"
_MANAGEMENT = f"{_TORCHSERVE}.management.ManagementAPIsService"

# The first row of a port that matches a request applies. Columns: the API of the port, the needed role, the
# routes, and the changes by method.
TABLE: tuple[Row, ...] = (
    *_rest(None, None, "/livez", "/startupz", "/readyz", "/readyz/{model}", "/readyz/{model}/{version}"),
    *_rest(None, None, "/", "/api-description"),
    *_rest("inference", None, PAGE),
    *_rest("metrics", "metrics", "/metrics", "/metrics/{rest:path}"),
    Row("rest", "management", API_KEY, "/token", {ANY_METHOD: "renew-token"}),
    *_rest("inference", "inference", PREDICTIONS, "/ping"),
    *_rest("inference", "inference", "/{first:wfpredict}/{workflow}"),
    *_rest("inference", "inference", "/{first:wfpredict}/{workflow}/{rest:path}"),
    *_rest("management", "management", "/models", POST="register"),
    *_rest("management", "management", "/models/{model}", _VERSION, PUT="scale", DELETE="unregister"),
    *_rest("management", "management", f"{_VERSION}/set-default", PUT="set-default"),
    *_rest("management", "management", f"{_VERSION}/quarantine", DELETE="lift-quarantine"),
    *_rest("management", "management", f"{_VERSION}/quarantine/{{digest}}", DELETE="lift-quarantine"),
    *_rest("management", "management", "/log-level", PUT="set-log-level"),
    *_rest("management", "management", "/workflows", POST="register-workflow"),
    *_rest("management", "management", "/workflows/{workflow}", DELETE="unregister-workflow"),
    *_rest("management", "management", "/workflows/{workflow}/{rest:path}", DELETE="unregister-workflow"),
    *_rest("management", "management", "/v2/repository/index"),
    *_rest("management", "management", "/v2/repository/models/{model}/load", POST="load"),
    *_rest("management", "management", "/v2/repository/models/{model}/unload", POST="unload"),
    # Paths that do not exist: on a shared port, their prefix decides which API's key is needed.
    *_rest("management", "management", "/models/{rest:path}", "/workflows/{rest:path}"),
    *_rest("management", "management", "/log-level/{rest:path}", "/v2/repository/{rest:path}"),
    *_rest("inference", "inference", "/v1/models", "/v1/models/{model}", "/v2"),
    *_rest("inference", "inference", "/v2/models", "/v2/models/stats"),
    *_rest("inference", None, "/v2/health/live", "/v2/health/ready"),  # probes in the protocol's words
    *_rest("inference", "inference", *[f"{_V2_MODEL}{end}" for end in ("", "/config", "/stats", "/ready")]),
    *_rest("inference", "inference", *[f"{_V2_VERSION}{end}" for end in ("", "/config", "/stats", "/ready")]),
    *_rest("inference", "inference", "/v2/systemsharedmemory", "/v2/systemsharedmemory/{rest:path}"),
    *_rest("inference", "inference", "/v2/cudasharedmemory", "/v2/cudasharedmemory/{rest:path}"),
    *_rest("inference", "inference", "/v2/trace", "/v2/trace/{rest:path}", f"{_V2_MODEL}/trace/setting"),
    *_rest("inference", "inference", "/v2/logging", "/v2/logging/{rest:path}"),
    *_rest("inference", "inference", "/v2/repository", "/v2/repository/{rest:path}"),
    *_rest("management", "management", "/v1/models/{model}"),
    *_grpc("inference", "inference", _INFERENCE, "Ping", "Predictions"),
    *_grpc("inference", "inference", _INFERENCE, "StreamPredictions", "StreamPredictions2"),
    *_protocol("inference.GRPCInferenceService"),  # Triton's name
    *_protocol(f"{_TORCHSERVE}.openinference.GRPCInferenceService"),
    *_grpc("inference", "inference", _REFLECTION[0], "ServerReflectionInfo"),
    *_grpc("inference", "inference", _REFLECTION[1], "ServerReflectionInfo"),
    *_grpc("inference", None, _HEALTH, "Check", "Watch"),
    *_grpc("management", "management", _MANAGEMENT, "DescribeModel", "ListModels"),
    *_grpc("management", "management", _MANAGEMENT, "RegisterModel", action="register"),
    *_grpc("management", "management", _MANAGEMENT, "ScaleWorker", action="scale"),
    *_grpc("management", "management", _MANAGEMENT, "SetDefault", action="set-default"),
    *_grpc("management", "management", _MANAGEMENT, "UnregisterModel", action="unregister"),
    *_grpc("management", "management", _REFLECTION[0], "ServerReflectionInfo"),
    *_grpc("management", "management", _REFLECTION[1], "ServerReflectionInfo"),
    *_grpc("management", None, _HEALTH, "Check", "Watch"),
)

# Routes with a role that report the health of the server or a model, for load balancers.
HEALTH_ROUTES = frozenset(
    {"/ping", f"{_V2_MODEL}/ready", f"{_V2_VERSION}/ready"}
    | {row.route for row in TABLE if row.route.endswith(("/Ping", "/ModelReady"))}
)
PROBES = frozenset({"/livez", "/readyz", "/startupz", "/v2/health/live", "/v2/health/ready"})
_MODEL_PROBES = "/readyz/"  # followed by a model, and perhaps its version
_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_CONVERTERS = {"": "[^/]+", "path": ".*", "wfpredict": "(?i:wfpredict)"}  # by their names in the framework


def is_probe(path: str) -> bool:
    """Tell whether a path is that of a probe of the server or of a model."""
    return path in PROBES or path.startswith(_MODEL_PROBES)


def grpc_rows(port: Role) -> Mapping[str, Row]:
    """Return the rows of an API's gRPC port, by path. A path without a row needs the role of the port."""
    return {row.route: row for row in TABLE if (row.transport, row.port) == ("grpc", port)}


def grpc_actions() -> Mapping[str, str]:
    """Return the changes that gRPC methods make, by path, without methods that only read."""
    return {row.route: row.actions[ANY_METHOD] for row in TABLE if row.transport == "grpc" and row.actions}


class RestPort:
    """The rows of one REST port, under the settings of the server.

    On a port that several APIs share, the path decides which role is needed. (TorchServe requires the keys of
    all of them there, so no request passes.)

    Args:
        surfaces: the APIs that the port serves.
        authorizes: whether the server asks for tokens or certificates at all.
        asks_for_metrics: whether the metrics need the role `metrics`; TorchServe's are for every client.
    """

    def __init__(self, surfaces: Surfaces, *, authorizes: bool, asks_for_metrics: bool = False) -> None:
        self.surfaces = surfaces
        self._authorizes = authorizes
        self._open: frozenset[Need] = frozenset({None} if asks_for_metrics else {None, "metrics"})
        served = [row for row in TABLE if row.transport == "rest" and (row.port or "") in (*surfaces, "")]
        self._rows = [(row, _pattern(row.route)) for row in served]
        self._other = Row("rest", None, _role_of_port(surfaces), "", {})
        self.page = next((row for row in served if row.route == PAGE), None)  # None: the port has no page

    def row(self, path: str) -> Row:
        """Return the row of a request; for a path that does not exist, a row with the role of the port.

        `path` is percent-decoded, without trailing slashes except for "/".
        """
        for row, pattern in self._rows:
            if pattern.fullmatch(path) or (row.route == PREDICTIONS and prediction_target(path) is not None):
                return row
        return self._other

    def role(self, row: Row) -> Role | None:
        """Return the role that a client must have to call a route; None: any client may call it."""
        return None if row.needs in self._open or row.needs == API_KEY else row.needs

    def asks(self, row: Row) -> bool:
        """Tell whether this server asks the clients of a route for a token or a certificate."""
        return self._authorizes and row.needs not in self._open


def named_model(route: str, path: str) -> tuple[str, str]:
    """Return the model (or workflow) and the version that the path of a route names; "": it names none."""
    found = _pattern(route).fullmatch(path)
    named = {} if found is None else found.groupdict("")
    return named.get("model", named.get("workflow", "")), named.get("version", "")


def _role_of_port(surfaces: Surfaces) -> Role:
    if "inference" in surfaces:
        return "inference"
    return "management" if "management" in surfaces else "metrics"


def _pattern(route: str) -> re.Pattern[str]:
    """Return the regular expression of a route, with a group for each parameter, as in the framework."""
    parts = _PARAMETER.split(route)
    text = re.escape(parts[0])
    for name, converter, literal in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{_CONVERTERS[converter or '']}){re.escape(literal)}"
    return re.compile(text, re.DOTALL)
