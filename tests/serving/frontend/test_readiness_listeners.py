"""Who watches readiness is called when the data plane changes it."""

from typing import Any

from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.telemetry.metrics import Metrics


class EmptyRegistry:
    """Has no models."""

    def missing(self):
        return []

    def versions(self):
        return []


def data_plane():
    registry: Any = EmptyRegistry()
    return DataPlane(registry, Metrics())


def test_a_start_and_a_drain_are_announced_behind_the_change():
    plane = data_plane()
    found = []
    plane.readiness_listeners.add(lambda: found.append(plane.readiness().ready))
    plane.opened()
    plane.draining()
    assert found == [True, False]


def test_a_listener_may_leave_while_all_are_called():
    plane = data_plane()
    called = []

    def leave():
        called.append(1)
        plane.readiness_listeners.discard(leave)

    plane.readiness_listeners.add(leave)
    plane.opened()
    plane.draining()
    assert called == [1]
