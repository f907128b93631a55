"""Saturation over a few seconds: from idle over busy to refusing, whatever the executors are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.telemetry.saturation import (
    TICK_S,
    WINDOW_S,
    BusyTime,
    LoadSample,
    SaturationWindow,
    saturation,
)

shares = st.floats(0, 1)


def value(busy_s=0.0, executor_s=10.0, queue_share=0.0, refused=0, offered=10):
    return saturation(
        busy_s=busy_s, executor_s=executor_s, queue_share=queue_share, refused=refused, offered=offered
    )


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({}, 0.0),
        ({"busy_s": 6.5}, 0.65),
        ({"busy_s": 10.0}, 1.0),
        ({"busy_s": 10.0, "queue_share": 0.5}, 1.5),
        ({"busy_s": 10.0, "queue_share": 1.0, "refused": 4}, 2.0),
        ({"busy_s": 10.0, "queue_share": 0.1, "refused": 9}, 1.9),  # a queue without room: tickets
        ({"busy_s": 11.0}, 1.0),  # a tick came late
        ({"executor_s": 0.0, "offered": 0}, 0.0),
    ],
)
def test_it_goes_from_idle_over_busy_to_refusing(load, expected):
    assert value(**load) == pytest.approx(expected)


@given(shares, shares, shares, shares)
def test_it_grows_with_each_of_its_parts_and_stays_between_0_and_2(busy, queue, refused, more):
    def at(busy, queue, refused):
        return value(busy * 10, queue_share=queue, refused=round(refused * 1000), offered=1000)

    before = at(busy, queue, refused)
    assert 0 <= before <= 2
    assert at(max(busy, more), queue, refused) >= before
    assert at(busy, max(queue, more), refused) >= before
    assert at(busy, queue, max(refused, more)) >= before


class Version:
    """A version whose load a test sets, its clock, and its window."""

    def __init__(self, executors=2, wanted=2):
        self.now_s = 1000.0
        self.busy = BusyTime()
        self.load = LoadSample(queue_room=10, executors=executors, wanted=wanted)
        self.counts = (0, 0)
        self.window = SaturationWindow(self.busy, lambda: self.load, lambda: self.counts)
        self.window.tick(self.now_s)

    def run(self, seconds, batches=None):
        """Let time pass with so many batches in executors (None: as before), ticking."""
        if batches is not None:
            self.busy.changed(batches, self.now_s)
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self.window.tick(self.now_s)

    @property
    def value(self):
        return self.window.value(self.now_s)


def test_a_version_that_was_just_registered_is_idle():
    assert Version().value == 0.0


def test_executors_that_are_busy_a_part_of_the_time_show_that_part_whenever_one_looks():
    version = Version(executors=1, wanted=1)
    found = []
    for turn in range(4000):  # 6.5 ms busy, 3.5 ms idle
        version.busy.changed(1, version.now_s)
        version.now_s += 0.0065
        if turn % 100 == 50:
            found.append(version.value)
        version.busy.changed(0, version.now_s)
        version.now_s += 0.0035
        if turn % 50 == 0:
            version.window.tick(version.now_s)
    assert found[5:] == pytest.approx([0.65] * len(found[5:]), abs=0.01)


def test_batches_that_were_sent_ahead_make_no_executor_busier_than_busy():
    version = Version()
    version.run(10, batches=7)
    assert version.value == pytest.approx(1.0)


def test_one_long_batch_is_seen_while_it_runs():
    version = Version()
    version.run(60, batches=1)
    assert version.value == pytest.approx(0.5)


def test_what_was_is_forgotten_after_the_window():
    version = Version()
    version.run(10, batches=2)
    version.run(WINDOW_S, batches=0)
    assert version.value == 0.0


def test_a_queue_that_is_full_for_half_of_the_time_counts_half():
    version = Version()
    version.busy.changed(2, version.now_s)
    for turn in range(40):
        version.load = version.load._replace(queued=10 * (turn % 2), queue_room=10 * ((turn + 1) % 2))
        version.run(TICK_S)
    assert version.value == pytest.approx(1.5, abs=0.1)


def test_refusals_count_where_the_queue_has_no_room_to_show():
    version = Version()
    version.load = version.load._replace(queue_room=0)
    version.busy.changed(2, version.now_s)
    for turn in range(20):
        version.counts = (87 * turn, 100 * turn)
        version.run(TICK_S)
    assert version.value == pytest.approx(1.87)


def test_while_executors_are_wanted_and_none_is_there_they_count_as_busy():
    version = Version(executors=0, wanted=2)
    version.run(10)
    assert version.value == pytest.approx(1.0)
    version.load = version.load._replace(executors=2)
    version.run(TICK_S + WINDOW_S)
    assert version.value == 0.0
    version.load = version.load._replace(executors=0, wanted=0)  # scaled to none
    version.run(TICK_S + WINDOW_S)
    assert version.value == 0.0


def test_more_executors_make_the_same_work_a_smaller_share():
    version = Version(executors=1, wanted=1)
    version.run(10, batches=1)
    assert version.value == pytest.approx(1.0)
    version.load = version.load._replace(executors=4, wanted=4)
    version.run(TICK_S + WINDOW_S)
    assert version.value == pytest.approx(0.25)


def test_scrapes_do_not_change_what_is_seen_and_keep_nothing_for_long():
    version = Version()
    version.busy.changed(1, version.now_s)
    for _ in range(5000):
        version.now_s += 0.01
        assert version.value == pytest.approx(0.5)
    assert len(version.window._window) <= WINDOW_S / 0.01 + 3
