"""What goes to a worker and comes back is the same on both sides, and nothing but it is accepted."""

import math
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchere.handlers.metrics import MAX_SAMPLES, MetricDeclaration, MetricSample
from torchere.serving.errors import (
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    InvalidRequest,
    LoadFailed,
    OutOfResources,
    ServingError,
)
from torchere.serving.types import MAX_RESPONSE_HEADERS, InferRequest, InferResponse, Parameter
from torchere.serving.workers import messages as wire
from torchere.serving.workers.executor import BatchReport, LoadSpec, Outcome, Unfinished
from torchere.serving.workers.frames import HEADER
from torchere.serving.workers.messages import (
    LARGE_BYTES,
    Done,
    Load,
    Partial,
    Ping,
    Pong,
    RankPids,
    Run,
    control_from_worker,
    control_to_worker,
    data_from_worker,
    data_of,
    data_to_worker,
    done_from_report,
    done_with_raw,
    encode_frame,
    encode_report,
    encode_run,
    load_of,
    most_report_bytes,
    pong_of,
    raw_answer_bytes,
    raw_bytes,
    report_from_done,
    run_with_raw,
)

LARGE = bytes(range(256)) * 200


def payload(parts: Any) -> bytes:
    (frame,) = [parts] if isinstance(parts, bytearray) else parts
    (length,) = HEADER.unpack_from(frame)
    assert length == len(frame) - HEADER.size
    return bytes(frame[HEADER.size :])


def test_a_batch_survives_the_way_to_a_worker() -> None:
    request = InferRequest("id", (Parameter("body", b"\x00\xff", "image/png"),), (("a", "é"),), 12.5)
    run = Run(7, 3, (request,))
    assert data_to_worker.decode(payload(encode_frame(run))) == run
    assert data_to_worker.decode(payload(encode_run(7, 3, [request]))) == run


def test_large_values_of_a_batch_follow_its_frame() -> None:
    small, large = Parameter("small", b"s"), Parameter("large", LARGE, "image/png")
    requests = tuple(InferRequest(name, (small, large, small, large)) for name in "ab")
    frame, *raw = encode_run(7, 3, requests)
    assert (len(raw), len(frame) < 1000) == (4, True)
    run = data_to_worker.decode(payload(frame))
    assert raw_bytes(run) == 4 * len(LARGE)
    assert run_with_raw(run, memoryview(b"".join(raw))) == Run(7, 3, requests)


def test_many_small_values_follow_the_frame_of_their_run_where_they_would_make_it_long() -> None:
    tiny, small = Parameter("tiny", b"t"), Parameter("small", bytes(range(250)) * 100, "text/plain")
    requests = tuple(InferRequest(name, (tiny, *[small] * 100, tiny)) for name in "ab")
    frame, *raw = encode_run(7, 3, requests)
    assert (len(raw), len(frame) < 2**20 + 10_000) == (200 - 2**20 // 25_000, True)
    run = data_to_worker.decode(payload(frame))
    assert run_with_raw(run, memoryview(b"".join(raw))) == Run(7, 3, requests)


def done_of(message: bytes) -> Done:
    done = data_from_worker.decode(message)
    assert isinstance(done, Done)
    return done


def test_large_answers_follow_the_frame_of_their_report() -> None:
    outcomes: list[Outcome] = [
        InferResponse(LARGE, (("k", "v"),), 418),
        HandlerFailed("no"),
        InferResponse(LARGE[:-1]),
    ]
    frame, *raw = encode_report(7, BatchReport(outcomes))
    done = done_of(payload(frame))
    assert raw_bytes(done) == sum(map(len, raw)) == 2 * len(LARGE) - 1
    back = report_from_done(done_with_raw(done, memoryview(b"".join(raw))), 3).outcomes
    assert (back[0], type(back[1]), back[2]) == (outcomes[0], HandlerFailed, outcomes[2])


def test_large_parts_of_unfinished_answers_follow_the_frame_of_their_report(tmp_path: Path) -> None:
    spec = LoadSpec("m", "1", str(tmp_path), "h:H")
    outcomes: list[Outcome] = [Unfinished(InferResponse(bytes(5_000_000), (("k", "v"),), 201))]
    frame, *raw = encode_report(7, BatchReport(outcomes))
    done = data_of(memoryview(payload([frame])), spec)
    assert isinstance(done, Done)
    assert raw_answer_bytes(done, spec, ["the request"]) == sum(map(len, raw)) == 5_000_000
    assert report_from_done(done_with_raw(done, memoryview(b"".join(raw))), 1).outcomes == outcomes


@pytest.mark.parametrize("large", [((0, -1),), ((-1, 1),), ((0, 0),), ((0, 2**30),) * 3])
def test_a_report_cannot_announce_impossible_answers(large: Any) -> None:
    done = done_from_report(7, BatchReport([InferResponse(b"")]))
    with pytest.raises(ValueError, match="large value"):
        raw_bytes(msgspec.structs.replace(done, large=large))


@pytest.mark.parametrize("index", [1, 2])
def test_a_large_answer_that_belongs_to_none_fails_its_batch(index: int) -> None:
    done = done_from_report(7, BatchReport([InferResponse(b""), HandlerFailed("no")]))
    forged = done_with_raw(msgspec.structs.replace(done, large=((index, 1),)), memoryview(b"x"))
    assert [type(outcome) for outcome in report_from_done(forged, 2).outcomes] == [ExecutorDied] * 2


def test_a_load_survives_the_way_to_a_worker() -> None:
    declared = (MetricDeclaration("Time", "ms", ("Level",), "gauge"),)
    spec = LoadSpec(
        "m",
        "1.0",
        "/dir",
        "h.py",
        {"model": {"x": [1]}},
        {"handler": {"k": None}},
        gpu_ids=(0, 1),
        declared_metrics=declared,
    )
    message = Load(spec, (1, None), "token")
    assert control_to_worker.decode(payload(encode_frame(message))) == message


@pytest.mark.parametrize(
    ("config", "is_sent"),
    [
        ({"handler": {"k": [1, 2.5, None, True, b"x"]}, "é": "ü"}, True),
        ({"since": date(2024, 1, 2)}, False),
        ({"handler": {"names": {"a"}}}, False),
        ({"pairs": [("a", 1)]}, False),
        ({"at": datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=1)))}, False),
        ({True: "a name that YAML takes for a truth value"}, False),
    ],
)
def test_a_model_config_that_would_become_another_stays_in_its_file(config: Any, is_sent: bool) -> None:
    spec = LoadSpec("m", "1.0", "/dir", "h.py", {"model": {"configFile": "c.yaml"}}, config)
    message = control_to_worker.decode(payload(encode_frame(load_of(spec, (None,), "token"))))
    assert isinstance(message, Load)
    assert (message.spec.model_config, message.config_file) == ((config, "") if is_sent else ({}, "c.yaml"))


def test_a_report_survives_the_way_back() -> None:
    metric = MetricSample("Time", 1.5, "ms", "gauge", (("Level", "Model"),), ("id",))
    outcomes: list[Outcome] = [
        InferResponse(b"x", (("k", "v"),), 418, "teapot"),
        HandlerFailed("no", 513, "why"),
        OutOfResources("Out of resources", "MemoryError"),
        Unfinished(InferResponse(b"part")),
    ]
    done = done_of(payload(encode_frame(done_from_report(7, BatchReport(outcomes, 0.25, (metric,))))))
    back = report_from_done(done, 4)
    assert (back.outcomes[0], back.outcomes[3]) == (outcomes[0], outcomes[3])
    assert isinstance(back.outcomes[1], HandlerFailed)
    assert (back.outcomes[1].message, back.outcomes[1].status, back.outcomes[1].detail) == ("no", 513, "why")
    assert isinstance(back.outcomes[2], OutOfResources)
    assert (back.handler_s, back.metrics) == (0.25, (metric,))


@pytest.mark.parametrize("told_s", [math.nan, math.inf, -1.0, 1e308])
def test_times_that_cannot_be_true_are_as_if_none_were_told(told_s: float) -> None:
    answer, metrics = InferResponse(b"x"), (MetricSample("n", 1.0, "ms", "gauge", (), ()),)
    true = BatchReport([answer], 0.25, metrics, (0.0, 0.25, 0.0), 1.0)
    assert report_from_done(done_from_report(7, true), 1) == true
    for field in ({"handler_s": told_s}, {"stages_s": (0.0, 0.0, told_s)}, {"began_s": told_s}):
        done = done_from_report(7, msgspec.structs.replace(true, **field))
        assert report_from_done(done, 1) == BatchReport([answer], metrics=metrics)


@pytest.mark.parametrize(
    "failure",
    [
        HandlerFailed("no", 504),
        HandlerFailed("no", 507),
        DeadlineExceeded("late"),
        InvalidRequest("wrong"),
        OutOfResources("full"),
    ],
)
def test_a_failure_is_of_the_same_kind_on_both_sides(failure: ServingError) -> None:
    (back,) = report_from_done(done_from_report(7, BatchReport([failure])), 1).outcomes
    assert type(back) is type(failure)
    assert vars(back) == vars(failure)


def test_metrics_that_cannot_be_sent_cost_no_answer() -> None:
    metric = MetricSample("x", object(), "ms", "gauge", (), ())  # type: ignore[arg-type]
    answer = InferResponse(b"x")
    done = done_of(payload(encode_report(7, BatchReport([answer], 0.25, (metric,)))))
    assert report_from_done(done, 1).outcomes == [answer]
    assert done.metrics == ()


def test_half_of_a_surrogate_pair_in_a_label_costs_no_metrics() -> None:
    one = MetricSample("a", 1.0, "ms", "gauge", (("word", "\ud800x"),), ("7",))
    other = MetricSample("b", 2.0, "ms", "gauge", (), ("7",))
    done = done_of(payload(encode_report(7, BatchReport([InferResponse(b"x")], 0.25, (one, other)))))
    assert done.metrics == (one._replace(dimensions=(("word", "?x"),)), other)


def test_the_cause_of_a_failed_load_is_kept_to_a_bounded_length() -> None:
    assert LoadFailed.of("m", "1", "x" * 10_000_000).detail == "x" * 10_000


def test_metrics_of_an_idle_worker_that_cannot_be_sent_cost_no_sign_of_life() -> None:
    sample = MetricSample("n", 1.0, "ms", "gauge", (), ())
    assert pong_of([sample]) == Pong((sample,))
    assert pong_of([sample] * (MAX_SAMPLES + 1)) == Pong((sample,) * MAX_SAMPLES)
    assert pong_of([sample, sample._replace(name="\ud800")]) == Pong((sample, sample._replace(name="?")))
    assert pong_of([sample._replace(name="n" * 2_000_000)] * 9) == Pong()


def test_metrics_with_more_text_than_a_report_may_hold_are_left_out() -> None:
    long = MetricSample("n" * 500_000, 1.0, "ms", "gauge", (), ())
    answer = InferResponse(b"x")
    for count, kept in ((8, 8), (9, 0)):
        done = done_of(payload(encode_report(7, BatchReport([answer], 0.25, (long,) * count))))
        assert (report_from_done(done, 1).outcomes, len(done.metrics)) == ([answer], kept)


def test_a_report_longer_than_a_worker_sends_is_not_decoded_but_a_part_of_that_length_is(
    tmp_path: Path,
) -> None:
    spec = LoadSpec("m", "1", str(tmp_path), "h:H")
    failed = BatchReport([HandlerFailed(detail="x" * 4_500_000)])
    with pytest.raises(ValueError, match="a report of 4500"):
        data_of(memoryview(payload(encode_frame(done_from_report(7, failed)))), spec)
    sent = data_of(memoryview(payload(encode_report(7, failed))), spec)
    assert isinstance(sent, Done)
    assert sent.outcomes[0].detail == "the answer can't be sent; the log says why"  # type: ignore[union-attr]
    part = Partial(7, 0, InferResponse(bytes(5_000_000)))
    assert data_of(memoryview(payload(encode_frame(part))), spec) == part


def test_a_report_of_as_many_requests_as_a_run_may_have_fits_into_a_frame_of_its_socket(
    tmp_path: Path,
) -> None:
    spec = LoadSpec("m", "1", str(tmp_path), "h:H", batch_size=64, max_response_bytes=1000)
    answer = InferResponse(b"x", (("long", "x" * (39 * LARGE_BYTES // 10)),))
    sent = payload(encode_report(7, BatchReport([answer] * spec.most_requests)))
    assert len(sent) <= most_report_bytes(spec)
    done = data_of(memoryview(sent), spec)
    assert isinstance(done, Done)
    assert done.outcomes[-1].headers == answer.headers  # type: ignore[union-attr]


def test_more_headers_or_ranks_than_there_are_in_earnest_are_refused_before_they_are_read() -> None:
    headers = (("a", "b"),) * MAX_RESPONSE_HEADERS
    part = Partial(7, 0, InferResponse(b"", headers))
    assert data_from_worker.decode(payload(encode_frame(part))) == part
    part = Partial(7, 0, InferResponse(b"", (*headers, ("a", "b"))))
    with pytest.raises(msgspec.ValidationError, match="length <= 1000"):
        data_from_worker.decode(payload(encode_frame(part)))
    with pytest.raises(msgspec.ValidationError, match="length <= 1024"):
        control_from_worker.decode(payload(encode_frame(RankPids((1,) * 1025))))


def test_a_report_with_more_metrics_than_a_worker_keeps_is_refused_before_they_are_read() -> None:
    sample = MetricSample("n", 1.0, "ms", "gauge", (), ())
    most = done_from_report(7, BatchReport([], 0.25, (sample,) * MAX_SAMPLES))
    assert len(done_of(payload(encode_frame(most))).metrics) == MAX_SAMPLES
    beyond = b"\x96\x0d\x07\x90\xcb" + bytes(8) + b"\xcb" + bytes(8) + b"\xdd\x7f\xff\xff\xff"
    with pytest.raises(msgspec.ValidationError, match="length <= 20000"):
        data_from_worker.decode(beyond)


def test_an_answer_that_cannot_be_sent_is_a_failure_of_its_handler() -> None:
    done = done_of(payload(encode_report(7, BatchReport([InferResponse(b"x", (), 2**70)]))))
    (failed,) = report_from_done(done, 1).outcomes
    assert isinstance(failed, HandlerFailed)


def test_an_answer_longer_than_a_frame_fails_alone_and_does_not_cost_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    done = done_of(payload(encode_report(7, BatchReport([InferResponse(b"x" * 1000)]))))
    (failed,) = report_from_done(done, 1).outcomes
    assert isinstance(failed, HandlerFailed)


def test_a_wrong_number_of_outcomes_fails_them_all() -> None:
    done = done_from_report(7, BatchReport([InferResponse(b"one")]))
    report = report_from_done(done, 2)
    assert len(report.outcomes) == 2
    assert all(isinstance(outcome, ExecutorDied) for outcome in report.outcomes)


@pytest.mark.parametrize("junk", [b"", b"\x80\x04K\x01.", b"\x93\x01\x02", b"\xc0", b"[1]"])
@pytest.mark.parametrize("decoder", [data_from_worker, control_from_worker])
def test_what_is_not_a_message_is_refused(decoder: Any, junk: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoder.decode(junk)


def test_a_message_of_the_other_socket_is_refused() -> None:
    done = payload(encode_frame(done_from_report(7, BatchReport([InferResponse(b"one")]))))
    with pytest.raises(msgspec.MsgspecError):
        control_from_worker.decode(done)
    with pytest.raises(msgspec.MsgspecError):
        data_from_worker.decode(payload(encode_frame(Pong())))
    with pytest.raises(msgspec.MsgspecError):
        data_to_worker.decode(payload(encode_frame(Ping())))
