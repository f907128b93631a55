"""The limits for each client with a clock that the test moves by hand."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.access import client_limits
from torchere.serving.access.client_limits import (
    CONCURRENCY,
    MAX_ACCOUNTS,
    RATE,
    Account,
    ClientLimits,
    Quota,
    client_limits_of,
    limits_in,
    network_of,
)
from torchere.serving.config.server_settings import ClientSettings
from torchere.serving.errors import TooManyRequests


class Stage:
    """Limits, their clock and their counters."""

    def __init__(self, default: Quota, own: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self.now_s = 100.0
        self.refused: Counter[str] = Counter()
        self.own = own or {}
        self.limits = ClientLimits(default, self.refused, lambda: self.own)

    def charge(self, client: str) -> Account:
        """Charge a request of the client now."""
        return self.limits.charge(client, self.now_s)

    def enter(self, client: str) -> Account:
        """Count a prediction of the client as unanswered."""
        account = self.limits.account(client)
        account.enter()
        return account

    def accepts(self, client: str = "a") -> bool:
        """Whether a request of the client is within its rate."""
        try:
            self.charge(client)
        except TooManyRequests:
            return False
        return True


def test_a_client_may_send_its_burst_at_once_and_then_its_rate() -> None:
    stage = Stage(Quota(rate=10.0, burst=3))
    assert [stage.accepts() for _ in range(4)] == [True, True, True, False]
    stage.now_s += 0.1
    assert [stage.accepts() for _ in range(2)] == [True, False]


def test_without_a_burst_a_client_may_send_the_requests_of_a_second_at_once_and_at_least_one() -> None:
    assert sum(Stage(Quota(rate=5.0)).accepts() for _ in range(1)) == 1
    stage = Stage(Quota(rate=5.0))
    assert sum(stage.accepts() for _ in range(20)) == 5
    slow = Stage(Quota(rate=0.1))
    assert [slow.accepts(), slow.accepts()] == [True, False]
    slow.now_s += 10.0
    assert slow.accepts()


@given(
    rate=st.floats(0.5, 1000.0),
    burst=st.integers(1, 50),
    pauses_s=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=60),
)
def test_no_client_gets_more_than_its_burst_and_its_rate(
    rate: float, burst: int, pauses_s: list[float]
) -> None:
    stage = Stage(Quota(rate=rate, burst=burst))
    began_s, accepted = stage.now_s, 0
    for pause_s in pauses_s:
        stage.now_s += pause_s
        accepted += stage.accepts()
    assert accepted <= burst + (stage.now_s - began_s) * rate + 1e-6


def test_a_refusal_says_when_the_next_request_is_within_the_rate() -> None:
    stage = Stage(Quota(rate=0.5, burst=1))
    stage.charge("a")
    with pytest.raises(TooManyRequests) as refusal:
        stage.charge("a")
    assert refusal.value.retry_after_s == pytest.approx(2.0)
    stage.now_s += refusal.value.retry_after_s or 0.0
    assert stage.accepts()


def test_a_refused_request_is_not_charged() -> None:
    stage = Stage(Quota(rate=1.0, burst=1))
    assert [stage.accepts() for _ in range(10)].count(True) == 1
    stage.now_s += 1.0
    assert stage.accepts()


def test_clients_do_not_use_up_the_rates_of_others() -> None:
    stage = Stage(Quota(rate=1.0, burst=1))
    assert [stage.accepts(name) for name in ("a", "b", "a", "b")] == [True, True, False, False]


def test_a_client_has_no_more_unanswered_predictions_than_it_may() -> None:
    stage = Stage(Quota(concurrency=2))
    first = stage.enter("a")
    stage.enter("a")
    with pytest.raises(TooManyRequests) as refusal:
        stage.enter("a")
    assert refusal.value.retry_after_s == 1.0
    assert not stage.accepts("a")  # nor is the next body read
    stage.enter("b")
    first.running -= 1
    stage.enter("a")
    assert stage.refused[CONCURRENCY] == 2


def test_the_limits_of_an_identity_replace_those_of_the_default() -> None:
    stage = Stage(Quota(rate=1.0, burst=1), {"a": {"burst": 3}, "b": {"rate": 0}})
    assert sum(stage.accepts("a") for _ in range(9)) == 3
    assert sum(stage.accepts("b") for _ in range(9)) == 9
    assert sum(stage.accepts("c") for _ in range(9)) == 1


def test_a_changed_quota_holds_from_the_next_request_on() -> None:
    stage = Stage(Quota(), {"a": {"concurrency": 1}})
    stage.enter("a")
    stage.own = {"a": {"concurrency": 2}}
    stage.charge("a")
    stage.enter("a")
    with pytest.raises(TooManyRequests):
        stage.enter("a")


def test_refusals_are_counted_by_limit_and_for_identities_only_by_name() -> None:
    stage = Stage(Quota(rate=1.0, burst=1), {"a": {"concurrency": 1}})
    for client in ("a", "a", "10.0.0.1", "10.0.0.1", "10.0.0.1"):
        stage.accepts(client)
    stage.enter("a")
    stage.accepts("a")
    assert stage.refused == {RATE: 3, CONCURRENCY: 1, client_limits.QUEUE_SHARE: 0}
    tallies = stage.limits.tallies()
    assert set(tallies) == {"", "a"}
    assert (tallies["a"].refused[RATE], tallies["a"].refused[CONCURRENCY]) == (1, 1)
    assert (tallies["a"].admitted, tallies["a"].running) == (1, 1)
    assert tallies[""].refused[RATE] == 2


def test_an_identity_that_leaves_the_file_takes_its_series_with_it() -> None:
    stage = Stage(Quota(), {"a": {"weight": 2}})
    account = stage.enter("a")
    stage.own = {}
    stage.charge("b")
    assert set(stage.limits.tallies()) == {""}
    assert stage.limits.tallies()[""].running == 1
    account.running -= 1
    assert stage.limits.tallies()[""].running == 0


def test_the_number_of_remembered_clients_is_bounded_and_busy_ones_are_kept() -> None:
    stage = Stage(Quota(concurrency=1))
    stage.enter("busy")
    for number in range(MAX_ACCOUNTS + 100):
        stage.charge(f"client {number}")
    assert len(stage.limits) == MAX_ACCOUNTS
    assert not stage.accepts("busy")


def test_the_client_that_was_idle_for_longest_is_forgotten() -> None:
    stage = Stage(Quota(rate=0.001, burst=1))
    stage.charge("first")
    stage.charge("second")
    for number in range(MAX_ACCOUNTS - 2):
        stage.charge(f"client {number}")
    assert not stage.accepts("first")  # a refused request counts as use
    stage.charge("one more")
    assert not stage.accepts("first")
    assert stage.accepts("second")


def test_a_client_with_a_connection_is_not_forgotten_until_it_ends() -> None:
    stage = Stage(Quota(rate=0.001, burst=1))
    kept = [stage.limits.keep("kept") for _ in range(2)]
    assert kept[0] is kept[1]
    kept[0].charge(stage.now_s)
    for number in range(MAX_ACCOUNTS + 100):
        stage.charge(f"client {number}")
    assert not stage.accepts("kept")
    stage.limits.let_go(kept[0])
    for number in range(MAX_ACCOUNTS + 100):
        stage.charge(f"another {number}")
    assert not stage.accepts("kept")
    stage.limits.let_go(kept[0])
    for number in range(MAX_ACCOUNTS):
        stage.charge(f"third {number}")
    assert stage.accepts("kept")


def test_the_table_is_as_small_as_before_once_many_connections_have_ended() -> None:
    stage = Stage(Quota())
    kept = [stage.limits.keep(f"kept {number}") for number in range(2 * MAX_ACCOUNTS)]
    assert len(stage.limits) == 2 * MAX_ACCOUNTS
    for account in kept:
        stage.limits.let_go(account)
    for number in range(MAX_ACCOUNTS // 4):
        stage.charge(f"client {number}")
    assert len(stage.limits) == MAX_ACCOUNTS


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("spiffe://example/a", "spiffe://example/a"),
    ],
)
def test_all_addresses_of_a_network_of_ipv6_are_one_client(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_client_with_many_addresses_of_ipv6_has_one_rate() -> None:
    stage = Stage(Quota(rate=1.0, burst=2))
    assert sum(stage.accepts(f"2001:db8::{number:x}") for number in range(20)) == 2


def test_an_identity_gets_the_limits_of_its_entry_and_no_others() -> None:
    entry = {"key": "secret12", "identity": "a", "rate": 2.5, "burst": 4, "concurrency": 3, "weight": 2}
    assert limits_in(entry) == {"rate": 2.5, "burst": 4, "concurrency": 3, "weight": 2}
    assert limits_in({"key": "secret12"}) == {}


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"rate": "5"}, "its rate is '5', expected a number from 0 to 1000000"),
        ({"rate": -1}, "its rate is -1"),
        ({"rate": float("nan")}, "its rate is nan"),
        ({"burst": 1.5}, "its burst is 1.5, expected a whole number from 0"),
        ({"concurrency": True}, "its concurrency is True"),
        ({"weight": 0}, "its weight is 0, expected a whole number from 1 to 100"),
        ({"weight": 101}, "its weight is 101"),
    ],
)
def test_a_limit_out_of_its_range_is_named(entry: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        limits_in(entry)


def test_clients_are_told_apart_only_where_a_setting_or_an_identity_asks_for_it() -> None:
    assert client_limits_of(ClientSettings(), None, Counter()) is None
    assert client_limits_of(ClientSettings(fair_queueing=True), None, Counter()) is not None
    assert client_limits_of(ClientSettings(), lambda: {"a": {}}, Counter()) is not None
    limits = client_limits_of(ClientSettings(rate=1.0, burst=1), None, Counter())
    assert limits is not None
    limits.charge("a", 100.0)
    with pytest.raises(TooManyRequests):
        limits.charge("a", 100.0)
