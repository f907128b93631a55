"""The order of a queue as a property of it."""

from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.batching.priority import HEAD_START_S, HIGHEST, LOWEST, position, rank_s
from torchere.serving.batching.request import Request


def waiting(name: str, priority: int, enqueued_s: float) -> Request:
    request = Request(name, 0.0)
    request.priority, request.enqueued_s = priority, enqueued_s
    return request


def queue_of(*arrivals: tuple[int, float]) -> list[Request]:
    """A queue after requests of these priorities came at these times."""
    queue: list[Request] = []
    for number, (priority, enqueued_s) in enumerate(arrivals):
        each = waiting(str(number), priority, enqueued_s)
        queue.insert(position(queue, each), each)
    return queue


def names(queue: list[Request]) -> list[str]:
    return [each.request_id for each in queue]


def test_the_more_urgent_goes_first_and_equals_in_the_order_they_came() -> None:
    assert names(queue_of((0, 0.0), (1, 0.1), (0, 0.2), (1, 0.3), (-1, 0.4))) == ["1", "3", "0", "2", "4"]


def test_no_request_is_overtaken_by_one_that_comes_after_the_head_start_is_used_up() -> None:
    patient = (LOWEST, 0.0)
    late_s = (HIGHEST - LOWEST) * HEAD_START_S
    assert names(queue_of(patient, (HIGHEST, late_s - 0.1), (HIGHEST, late_s))) == ["1", "0", "2"]


@given(st.lists(st.tuples(st.integers(LOWEST, HIGHEST), st.floats(0.0, 10.0)), max_size=20))
def test_a_queue_is_always_in_the_order_of_its_ranks(arrivals: list[tuple[int, float]]) -> None:
    queue = queue_of(*sorted(arrivals, key=lambda arrival: arrival[1]))
    ranks = [rank_s(each.enqueued_s, each.priority) for each in queue]
    assert ranks == sorted(ranks)
