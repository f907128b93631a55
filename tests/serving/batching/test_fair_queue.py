"""The order of the waiting requests of several clients, and by rank."""

from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from torchere.serving.access.client_limits import Account, Quota, Tally
from torchere.serving.batching.fair_queue import HEAD_START_S, HIGHEST, LOWEST, FairQueue, position, rank_s
from torchere.serving.batching.request import Request


class Clients:
    """Requests of named clients, numbered by client: a1, a2, b1."""

    def __init__(self, **weights: int) -> None:
        self._weights = weights
        self._accounts: dict[str, Account] = {}
        self._numbers: dict[str, count[int]] = {}

    def request(self, name: str, priority: int = 0, enqueued_s: float = 0.0) -> Request:
        if name not in self._accounts:
            quota = Quota(weight=self._weights.get(name, 1))
            self._accounts[name] = Account(name, quota, Tally(), Counter())
            self._numbers[name] = count(1)
        request = Request(f"{name}{next(self._numbers[name])}", 0.0)
        request.account = self._accounts[name]
        request.priority, request.enqueued_s = priority, enqueued_s
        return request


def queue_of(clients: Clients, names: str, batch_size: int = 1) -> FairQueue:
    """A queue after one request of each named client came."""
    queue = FairQueue(batch_size)
    for name in names:
        queue.add(clients.request(name))
    return queue


def taken(queue: FairQueue, number: int) -> list[str]:
    """The ids of the next requests, taken out."""
    return [queue.first(1).popleft().request_id for _ in range(number)]


def test_requests_of_one_client_run_in_the_order_they_came() -> None:
    queue = queue_of(Clients(), "aaaa")
    assert taken(queue, 4) == ["a1", "a2", "a3", "a4"]
    assert not queue


def test_requests_without_an_account_run_in_the_order_they_came() -> None:
    queue = FairQueue(1)
    for name in "abc":
        queue.add(Request(name, 0.0))
    assert taken(queue, 3) == ["a", "b", "c"]


def test_clients_take_turns() -> None:
    queue = queue_of(Clients(), "aaaabbc")
    assert taken(queue, 7) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_in_its_turn_a_client_has_as_many_requests_as_its_weight() -> None:
    queue = queue_of(Clients(a=3), "aaaaaabbb")
    assert taken(queue, 9) == ["a1", "a2", "a3", "b1", "a4", "a5", "a6", "b2", "b3"]


def test_a_newcomer_is_in_the_next_batch_however_many_requests_of_another_client_wait() -> None:
    clients = Clients()
    queue = queue_of(clients, "a" * 1000, batch_size=4)
    taken(queue, 4)
    queue.add(clients.request("b"))
    assert taken(queue, 4) == ["a5", "b1", "a6", "a7"]


def test_a_client_with_one_request_at_a_time_does_not_take_every_turn() -> None:
    clients = Clients()
    queue = queue_of(clients, "aaaab")
    order = []
    for _ in range(6):
        (one,) = taken(queue, 1)
        order.append(one[0])
        if one[0] == "b":
            queue.add(clients.request("b"))
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_new_clients_do_not_keep_one_that_waits_from_its_turn() -> None:
    clients = Clients()
    queue = queue_of(clients, "aab")
    order = []
    for name in "cdef":
        order += taken(queue, 1)
        queue.add(clients.request(name))
    assert "a2" in order


def test_fewer_requests_than_a_batch_run_in_the_order_they_came() -> None:
    assert taken(queue_of(Clients(), "aab", batch_size=4), 3) == ["a1", "a2", "b1"]


def test_a_priority_orders_the_requests_of_its_client_only() -> None:
    clients = Clients()
    queue = FairQueue(1)
    for name, priority in (("a", 0), ("a", 0), ("a", 9), ("b", 0), ("b", 1)):
        queue.add(clients.request(name, priority))
    assert taken(queue, 5) == ["a3", "b2", "a1", "b1", "a2"]


def test_a_request_that_is_put_back_runs_next() -> None:
    clients = Clients()
    queue = queue_of(clients, "aaabbb", batch_size=2)
    first = queue.first(2).popleft()
    queue.put_back(first)
    assert taken(queue, 3) == ["a1", "b1", "a2"]


def test_the_place_of_a_request_is_known_before_it_waits() -> None:
    clients = Clients(c=2)
    queue = queue_of(clients, "aaaaaabb")
    assert queue.before(clients.request("a")) == 8
    assert queue.before(clients.request("b")) == 4 + 1  # two of its own, and two turns and the present one
    assert queue.before(clients.request("c")) == 2


def test_a_client_below_its_share_takes_the_place_of_the_last_request_of_the_longest_line() -> None:
    clients = Clients()
    queue = queue_of(clients, "aaaaaab")
    newcomer = clients.request("b")
    assert queue.has_share_left(newcomer)
    queue.add(newcomer)
    assert queue.displace().request_id == "a6"
    assert len(queue) == 7


def test_a_client_with_its_share_displaces_no_request() -> None:
    clients = Clients()
    queue = queue_of(clients, "aaabbb")
    assert not queue.has_share_left(clients.request("a"))
    assert not queue.has_share_left(clients.request("b"))
    assert queue.has_share_left(clients.request("c"))
    assert not queue_of(clients, "a").has_share_left(clients.request("b"))  # else they would in turns
    assert not FairQueue(1).has_share_left(clients.request("a"))


def test_shares_of_the_queue_are_by_weight() -> None:
    clients = Clients(a=3)
    queue = queue_of(clients, "a" * 6 + "b" * 2)
    assert not queue.has_share_left(clients.request("a"))
    assert not queue.has_share_left(clients.request("b"))


STEPS = ["add", "displace", "take", "remove", "back"]
Steps = st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abcd")))


@settings(max_examples=300)
@given(steps=Steps, batch_size=st.integers(1, 4))
def test_no_request_is_lost_or_doubled_and_those_of_a_client_stay_in_order(
    steps: list[tuple[str, str]], batch_size: int
) -> None:
    clients, queue = Clients(b=2), FairQueue(batch_size)
    waiting: dict[str, Request] = {}
    for step, name in steps:
        if step in ("add", "displace"):
            request = clients.request(name)
            displaces = step == "displace" and queue.has_share_left(request)
            queue.add(request)
            waiting[request.request_id] = request
            if displaces:
                displaced = queue.displace()
                assert displaced.account is not request.account
                del waiting[displaced.request_id]
        elif step == "remove" and waiting:
            request = waiting.pop(next(iter(waiting)))
            assert queue.remove(request)
            assert not queue.remove(request)
        elif waiting:
            request = queue.first(batch_size).popleft()
            own = [one for one in waiting.values() if one.account is request.account]
            assert request is own[0]
            if step == "take":
                del waiting[request.request_id]
            else:
                queue.put_back(request)
        assert len(queue) == len(waiting)
        assert {one.request_id for one in queue} == set(waiting)


@given(st.text("abc", min_size=1, max_size=60), st.integers(1, 4))
def test_a_client_waits_for_one_turn_of_each_other(names: str, batch_size: int) -> None:
    """Of clients that wait all the time, none has two requests more than another."""
    clients = Clients()
    queue = queue_of(clients, names + "a" * 50 + "b" * 50 + "c" * 50, batch_size)
    taken(queue, batch_size)  # the first batch was settled before
    ran = Counter(each[0] for each in taken(queue, 60))
    assert max(ran.values()) - min(ran.values()) <= 1 + batch_size


def ranked_request(name: str, priority: int, enqueued_s: float) -> Request:
    request = Request(name, 0.0)
    request.priority, request.enqueued_s = priority, enqueued_s
    return request


def ranked(*arrivals: tuple[int, float]) -> list[Request]:
    """A queue after requests of these priorities came at these times."""
    queue: list[Request] = []
    for number, (priority, enqueued_s) in enumerate(arrivals):
        each = ranked_request(str(number), priority, enqueued_s)
        queue.insert(position(queue, each), each)
    return queue


def names(queue: list[Request]) -> list[str]:
    return [each.request_id for each in queue]


def test_the_more_urgent_goes_first_and_equals_in_the_order_they_came() -> None:
    assert names(ranked((0, 0.0), (1, 0.1), (0, 0.2), (1, 0.3), (-1, 0.4))) == ["1", "3", "0", "2", "4"]


def test_no_request_is_overtaken_by_one_that_comes_after_the_head_start_is_used_up() -> None:
    patient = (LOWEST, 0.0)
    late_s = (HIGHEST - LOWEST) * HEAD_START_S
    assert names(ranked(patient, (HIGHEST, late_s - 0.1), (HIGHEST, late_s))) == ["1", "0", "2"]


@given(st.lists(st.tuples(st.integers(LOWEST, HIGHEST), st.floats(0.0, 10.0)), max_size=20))
def test_a_queue_is_always_in_the_order_of_its_ranks(arrivals: list[tuple[int, float]]) -> None:
    queue = ranked(*sorted(arrivals, key=lambda arrival: arrival[1]))
    ranks = [rank_s(each) for each in queue]
    assert ranks == sorted(ranks)
