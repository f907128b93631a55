import asyncio
import contextlib
import gc
import time

from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry import sampling as process_metrics
from torchere.serving.telemetry.exposition import samples_of
from torchere.serving.telemetry.sampling import ProcessMetrics


def values(metrics):
    families = catalogue.families()
    metrics.add_to(families)
    collected = [*families.values(), *metrics.library.collect()]
    return {sample.name: sample.value for family in collected for sample in samples_of(family)}


def test_the_process_is_described():
    metrics = ProcessMetrics()
    found = values(metrics)
    assert found["torchere_build_info"] == 1
    assert found["torchere_process_threads"] >= 1
    assert found["process_resident_memory_bytes"] > 1_000_000
    families = catalogue.families()
    metrics.add_to(families)
    (build,) = families["torchere_build_info"].samples
    assert set(build.labels) == {"version", "torch", "python", "gil"}


def test_a_loop_that_stood_still_has_a_lag_and_collections_have_their_time(monkeypatch):
    monkeypatch.setattr(process_metrics, "LAG_PERIOD_S", 0.01)
    metrics = ProcessMetrics()

    async def stand_still():
        watch = asyncio.create_task(metrics.watch_loop())
        await asyncio.sleep(0)
        time.sleep(0.2)  # nothing else runs
        gc.collect()
        while not values(metrics)["torchere_event_loop_lag_seconds_count"]:
            await asyncio.sleep(0.01)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(stand_still())
    found = values(metrics)
    assert found["torchere_event_loop_lag_seconds_sum"] > 0.1
    assert found["torchere_gc_pause_seconds_total"] > 0
    assert metrics._collecting not in gc.callbacks


def test_the_expiry_is_that_of_the_certificate_in_force_at_each_exposition():
    metrics, expires = ProcessMetrics(), [1.8e9, 2.5e9, None]
    assert "torchere_certificate_expiry_timestamp_seconds" not in values(metrics)
    metrics.watch_certificate(lambda: expires[0])
    for expected in tuple(expires):
        assert values(metrics).get("torchere_certificate_expiry_timestamp_seconds") == expected
        del expires[0]
