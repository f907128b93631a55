from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.telemetry.timeline import COLUMNS, STAGES, Timeline, row_of

seconds = st.floats(0, 1000, allow_nan=False)


class Request:
    def __init__(self, enqueued_s, dequeued_s, company_s=0.0, stages_s=(0.0, 0.0, 0.0, 0.0)):
        self.enqueued_s, self.dequeued_s = enqueued_s, dequeued_s
        self.company_s, self.stages_s = company_s, stages_s


def split(timeline, request, now_s):
    return dict(zip(COLUMNS, row_of(timeline, request, now_s), strict=True))


def answered(request, *, read_s=1.0, answered_s=9.0, sending_s=9.5):
    timeline = Timeline("rest", "r", 0.0)
    timeline.read_s, timeline.sending_s = read_s, sending_s
    timeline.answered(request, answered_s)
    return timeline


def test_each_stage_has_its_own_time():
    request = Request(2.0, 5.0, company_s=1.0, stages_s=(0.5, 1.0, 0.25, 0.25))
    assert split(answered(request), request, 10.0) == {
        "total": 10.0,
        "wait": 3.0,
        "receive": 1.0,
        "decode": 1.0,
        "queue": 2.0,
        "batch_wait": 1.0,
        "transfer": 2.0,
        "preprocess": 0.5,
        "inference": 1.0,
        "postprocess": 0.25,
        "handler": 0.25,
        "encode": 0.5,
        "send": 0.5,
    }


def test_of_a_stream_that_begins_before_its_handler_ends_the_handler_has_what_is_left():
    request = Request(2.0, 5.0, stages_s=(1.0, 40.0, 1.0, 0.0))
    found = split(answered(request), request, 60.0)
    assert (found["transfer"], found["handler"], found["send"]) == (0.0, 4.0, 50.5)


def test_what_was_not_marked_took_no_time():
    request = Request(0.0, 1.0)
    found = split(answered(request, read_s=0.0, answered_s=2.0, sending_s=0.0), request, 3.0)
    assert (found["receive"], found["encode"], found["send"]) == (0.0, 1.0, 0.0)


@given(st.lists(seconds, min_size=7, max_size=7), st.tuples(seconds, seconds, seconds, seconds), seconds)
def test_the_stages_add_up_to_the_whole(doors, stages_s, company_s):
    started_s, read_s, enqueued_s, dequeued_s, answered_s, sending_s, now_s = sorted(doors)
    request = Request(enqueued_s, dequeued_s, min(company_s, dequeued_s - enqueued_s), stages_s)
    timeline = Timeline("rest", "r", started_s)
    timeline.read_s, timeline.sending_s = read_s, sending_s
    timeline.answered(request, answered_s)
    found = split(timeline, request, now_s)
    assert sum(found[stage] for stage in STAGES) == pytest.approx(found["total"], abs=1e-9)
    assert min(found.values()) >= -1e-9
