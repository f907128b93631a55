"""The table of sequences, with the time passed in."""

import pytest

from torchere.serving.batching.request import Request
from torchere.serving.batching.sequences import SequenceTable
from torchere.serving.config.server_settings import SequenceSettings
from torchere.serving.errors import QueueFull


def table(**settings: float) -> SequenceTable:
    defaults = {"max_idle_s": 10.0, "max_sequences": 2, "max_queue_size": 2}
    return SequenceTable(SequenceSettings(**{**defaults, **settings}), "no worker")  # type: ignore[arg-type]


def waiting(name: str, at_s: float = 0.0) -> Request:
    request = Request(name, 0.0)
    request.enqueued_s = at_s
    return request


def test_a_sequence_stays_on_the_executor_that_took_it_first() -> None:
    sequences = table()
    sequences.add("s", waiting("a"), 0.0)
    sequences.add("s", waiting("b"), 0.0)
    (sequence,) = sequences.heads(9000, 4)
    taken = sequences.take(sequence, 9000)
    assert taken.request_id == "a"
    assert sequences.heads(9000, 4) == []  # one at a time
    sequences.done("s", taken, 1.0)
    assert sequences.heads(9001, 4) == []
    assert [s.name for s in sequences.heads(9000, 4)] == ["s"]


def test_the_oldest_heads_come_first() -> None:
    sequences = table(max_sequences=3)
    for name, at_s in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        sequences.add(name, waiting(name, at_s), at_s)
    assert [s.name for s in sequences.heads(9000, 2)] == ["early", "middle"]


def test_the_number_of_sequences_and_of_their_requests_is_bounded() -> None:
    sequences = table()
    for name in ("s", "s", "t"):
        sequences.add(name, waiting(name), 0.0)
    for name in ("s", "u"):
        with pytest.raises(QueueFull):
            sequences.add(name, waiting(name), 0.0)


def test_an_idle_sequence_ends_and_makes_room() -> None:
    sequences = table(max_sequences=1)
    sequences.add("s", waiting("a"), 0.0)
    (sequence,) = sequences.heads(1, 1)
    sequences.done("s", sequences.take(sequence, 1), 5.0)
    assert sequences.next_expiry_s() == 15.0
    assert sequences.expire(15.0) == []
    sequences.add("t", waiting("b"), 15.0)
    assert [s.name for s in sequences.heads(1, 9)] == ["t"]


def test_a_sequence_does_not_idle_while_a_request_runs_nor_from_before_the_last_one_came() -> None:
    sequences = table()
    first, second = waiting("a"), waiting("b")
    sequences.add("s", first, 0.0)
    (head,) = sequences.heads(1, 1)
    sequences.take(head, 1)
    assert sequences.expire(99.0) == [] and len(sequences) == 1
    sequences.done("s", first, 99.0)
    sequences.add("s", second, 105.0)
    sequences.remove(second)  # its client left
    assert sequences.next_expiry_s() == 115.0
    sequences.add("t", waiting("c"), 105.0)  # waits, so that it does not idle
    assert sequences.next_expiry_s() == 115.0


def test_a_request_that_was_not_begun_goes_in_front_again() -> None:
    sequences = table()
    first, second = waiting("a"), waiting("b")
    for each in (first, second):
        sequences.add("s", each, 0.0)
    (sequence,) = sequences.heads(1, 1)
    sequences.take(sequence, 1)
    assert sequences.give_back("s", first)
    assert sequences.waiting == [first, second]
    assert sequences.end(["s", "nobody's"]) == [first, second]
    assert not sequences.give_back("s", first)


def test_a_sequence_that_waits_does_not_idle_but_its_life_is_bounded() -> None:
    sequences = table(timeout_s=30.0)
    sequences.add("s", waiting("a"), 0.0)
    assert sequences.expire(29.0) == []
    assert [request.request_id for request in sequences.expire(30.0)] == ["a"]
    assert len(sequences) == 0


def test_sequences_of_a_lost_executor_go_on_elsewhere() -> None:
    sequences = table()
    sequences.add("s", waiting("a"), 0.0)
    (sequence,) = sequences.heads(1, 1)
    sequences.done("s", sequences.take(sequence, 1), 0.0)
    sequences.add("s", waiting("b"), 0.0)
    sequences.keep_on([1, 2])
    assert sequences.heads(2, 1) == []
    sequences.keep_on([2])
    assert [s.name for s in sequences.heads(2, 1)] == ["s"]


def test_an_expired_sequence_goes_on_where_its_state_may_be_and_an_ended_one_anywhere() -> None:
    sequences = table()
    for name, executor_id in (("idle", 9000), ("ended", 9001)):
        sequences.add(name, waiting(name), 0.0)
        (sequence,) = sequences.heads(executor_id, 4)
        sequences.done(name, sequences.take(sequence, executor_id), 0.0)
    sequences.end(["ended"])
    sequences.expire(10.0)
    assert len(sequences) == 0
    for name in ("idle", "ended"):
        sequences.add(name, waiting(name), 11.0)
    assert [sequence.name for sequence in sequences.heads(9001, 4)] == ["ended"]
    sequences.keep_on([9001])  # its executor is gone, and the state with it
    assert [sequence.name for sequence in sequences.heads(9001, 4)] == ["idle", "ended"]
