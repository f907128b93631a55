"""Construction of the listener of each REST port."""

from __future__ import annotations

from starlette.types import ASGIApp

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.listener import DeferredApp, Listener
from torchere.serving.frontend.services import Services


def listener_of(
    surfaces: Surfaces, dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> Listener:
    """Return the listener of a port that serves the named APIs. Use it on one event loop only."""

    def build() -> ASGIApp:
        from torchere.serving.frontend.rest.routes import routes  # noqa: PLC0415 - imports the framework

        return routes(surfaces, dataplane, controlplane, services)

    return Listener(surfaces, services, dataplane, DeferredApp(build))


def listeners(settings: ServerSettings) -> list[tuple[Address, Surfaces]]:
    """Return the addresses to listen on, each with its APIs; equal addresses share one listener.

    Port 0 means any free port, so two addresses with port 0 are never equal. A listener shared by two or more
    APIs serves the metrics too, if a metrics address is configured.
    """
    wanted: list[tuple[Address, Surfaces]] = [
        (settings.inference_address, frozenset({"inference"})),
        (settings.management_address, frozenset({"management"})),
    ]
    if settings.metrics_address is not None:
        wanted.append((settings.metrics_address, frozenset({"metrics"})))
    merged: list[tuple[Address, Surfaces]] = []
    for address, surfaces in wanted:
        same = [i for i, (other, _) in enumerate(merged) if other == address and _is_fixed(address)]
        if same:
            merged[same[0]] = (address, merged[same[0]][1] | surfaces)
        else:
            merged.append((address, surfaces))
    extra: Surfaces = frozenset() if settings.metrics_address is None else frozenset({"metrics"})
    return [(address, surfaces | extra if len(surfaces) > 1 else surfaces) for address, surfaces in merged]


def _is_fixed(address: Address) -> bool:
    return address.unix_path is not None or address.port != 0
