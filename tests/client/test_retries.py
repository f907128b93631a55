import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.client import AnswerError, ConnectionFailed, DeadlineExceeded, ModelFailed, Retries, Unavailable

REFUSED = ConnectionFailed("nobody listens", refused=True)


def busy(retry_after_s: float | None = None) -> Unavailable:
    return Unavailable("full", 503, kind="ServiceUnavailableException", retry_after_s=retry_after_s)


@pytest.mark.parametrize(
    "error",
    [
        AnswerError("bad", 400),
        ModelFailed("Prediction failed", 503),
        Unavailable("upstream connect error or disconnect/reset before headers", 503, retry_after_s=1.0),
        ConnectionFailed("broke in the middle"),
        DeadlineExceeded("no answer within 1 s"),
    ],
)
def test_what_may_have_run_is_not_sent_again(error: AnswerError) -> None:
    assert Retries().pause_s(error, 1, 60, 0.5) is None


@pytest.mark.parametrize("error", [busy(), Unavailable("slow down", 429), REFUSED])
def test_what_cannot_have_run_is_sent_again(error: AnswerError) -> None:
    assert Retries().pause_s(error, 1, 60, 0.5) == pytest.approx(0.075)


def test_the_pause_doubles_up_to_the_longest() -> None:
    retries = Retries(most=10, first_pause_s=1, longest_pause_s=5)
    assert [retries.pause_s(REFUSED, n, 60, 1.0) for n in (1, 2, 3, 4, 10)] == [1, 2, 4, 5, 5]


def test_a_patient_client_may_try_any_number_of_times() -> None:
    retries = Retries(most=10**6, first_pause_s=1, longest_pause_s=5)
    assert retries.pause_s(REFUSED, 10**5, 60, 1.0) == 5


def test_after_the_most_attempts_the_error_is_final() -> None:
    assert Retries(most=2).pause_s(REFUSED, 3, 60, 0) is None
    assert Retries(most=0).pause_s(REFUSED, 1, 60, 0) is None


def test_the_server_is_not_asked_before_the_time_it_named() -> None:
    assert Retries().pause_s(busy(2.0), 1, 60, 0.0) == 2.0
    assert Retries().pause_s(busy(2.0), 1, 60, 1.0) == 2.5


def test_a_server_that_asks_for_too_much_time_is_not_asked_again() -> None:
    assert Retries(longest_pause_s=1).pause_s(busy(2.0), 1, 60, 0.5) is None
    assert Retries(longest_pause_s=2).pause_s(busy(2.0), 1, 60, 0.0) == 2.0


@given(attempt=st.integers(1, 10), remaining=st.floats(0, 100), dice=st.floats(0, 1), asked=st.floats(0, 10))
def test_no_pause_ends_after_the_deadline(attempt: int, remaining: float, dice: float, asked: float) -> None:
    for error in (REFUSED, busy(asked)):
        pause_s = Retries(most=10).pause_s(error, attempt, remaining, dice)
        assert pause_s is None or pause_s < remaining


def test_every_pause_may_be_the_same() -> None:
    assert Retries(first_pause_s=1, longest_pause_s=1).pause_s(REFUSED, 3, 60, 1.0) == 1


@pytest.mark.parametrize("wrong", [{"most": -1}, {"first_pause_s": 0}, {"longest_pause_s": 0.01}])
def test_senseless_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected most >= 0"):
        Retries(**wrong)  # type: ignore[arg-type]
