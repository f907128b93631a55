from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.batching.request import Request
from torchere.serving.telemetry.stages import COLUMNS, MARKS, STAGES, row_of, rows_of, server_timing

seconds = st.floats(0, 1000, allow_nan=False)


def request(**marks):
    """A prediction that began at 0, was read at 1, and was enqueued at 2."""
    usual: dict[str, Any] = {"started_s": 0.0, "read_s": 1.0, "enqueued_s": 2.0, "dequeued_s": 5.0}
    usual |= {"company_s": 0.0, "stages_s": (0.0, 0.0, 0.0, 0.0), "answered_s": 9.0, "sending_s": 9.5}
    return SimpleNamespace(**(usual | marks))


def split(asked, now_s):
    return dict(zip(COLUMNS, row_of(asked, now_s), strict=True))


def test_each_stage_has_its_own_time():
    assert split(request(company_s=1.0, stages_s=(0.5, 1.0, 0.25, 0.25)), 10.0) == {
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
    found = split(request(stages_s=(1.0, 40.0, 1.0, 0.0)), 60.0)
    assert (found["transfer"], found["handler"], found["send"]) == (0.0, 4.0, 50.5)


def test_what_was_not_marked_took_no_time():
    asked = request(read_s=0.0, enqueued_s=0.0, dequeued_s=1.0, answered_s=2.0, sending_s=0.0)
    found = split(asked, 3.0)
    assert (found["receive"], found["encode"], found["send"]) == (0.0, 1.0, 0.0)


doors = st.lists(seconds, min_size=7, max_size=7).map(sorted)
stages = st.tuples(seconds, seconds, seconds, seconds)


def asked_at(moments, stages_s, company_s):
    started_s, read_s, enqueued_s, dequeued_s, answered_s, sending_s, now_s = moments
    company_s = min(company_s, dequeued_s - enqueued_s)
    marks = {"started_s": started_s, "read_s": read_s, "enqueued_s": enqueued_s, "dequeued_s": dequeued_s}
    marks |= {"company_s": company_s, "answered_s": answered_s, "sending_s": sending_s}
    return request(stages_s=stages_s, **marks), now_s


@given(doors, stages, seconds)
def test_the_stages_add_up_to_the_whole(moments, stages_s, company_s):
    found = split(*asked_at(moments, stages_s, company_s))
    assert sum(found[stage] for stage in STAGES) == pytest.approx(found["total"], abs=1e-9)
    assert min(found.values()) >= -1e-9


@given(st.lists(st.tuples(doors, stages, seconds), min_size=1, max_size=20))
def test_many_predictions_are_split_as_each_one_is(predictions):
    asked = [asked_at(*prediction) for prediction in predictions]
    marks = [
        (
            *(each.started_s, each.read_s, each.enqueued_s, each.dequeued_s, each.company_s),
            *(*each.stages_s, each.answered_s, each.sending_s, now_s, 0.0),
        )
        for each, now_s in asked
    ]
    rows = rows_of(np.array(marks).reshape(-1, len(MARKS)))
    expected = np.array([row_of(each, now_s) for each, now_s in asked])
    # Where the transfer is 0, rounding decides whether the handler ended before its answer.
    sure = abs(expected[:, COLUMNS.index("transfer")]) > 1e-6
    sure |= np.array([sum(each.stages_s) > each.answered_s - each.dequeued_s + 1e-6 for each, _ in asked])
    assert rows[sure] == pytest.approx(expected[sure], abs=1e-9)


def test_server_timing_tells_the_stages_in_milliseconds_and_leaves_out_those_that_took_no_time():
    request = Request("r1", 10.0)
    request.enqueued_s, request.dequeued_s, request.answered_s = 10.25, 10.5, 11.5
    request.stages_s = (0.0, 0.75, 0.0, 0.0)
    assert server_timing(request, 11.75) == (
        "decode;dur=250.000, queue;dur=250.000, transfer;dur=250.000, inference;dur=750.000, "
        "encode;dur=250.000, total;dur=1750.000"
    )
