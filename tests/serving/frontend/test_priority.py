"""What the header may say, and on whose request it lands."""

import pytest

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.priority import parse_priority, prioritised
from torchere.serving.types import InferRequest


@pytest.mark.parametrize(("text", "priority"), [("0", 0), (" 9 ", 9), ("-9", -9), ("+3", 3), (b"5", 5)])
def test_a_small_whole_number_is_a_priority(text: str | bytes, priority: int) -> None:
    assert parse_priority(text) == priority


@pytest.mark.parametrize(
    "text", ["", "10", "-10", "high", "1.0", "--1", "-+5", "+", "٣", "1 2", b"\xff", "9" * 5000]
)
def test_anything_else_is_refused_with_what_was_found(text: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match="x-torchere-priority must be a whole number from -9 to 9"):
        parse_priority(text)


def test_a_request_gets_the_priority_of_its_header_in_any_spelling() -> None:
    request = InferRequest("id", (), (("X-Torchere-Priority", "4"),), 7.0)
    assert prioritised(request) == InferRequest("id", (), request.headers, 7.0, 4)


def test_metadata_beside_the_request_count_where_there_are_some() -> None:
    assert prioritised(InferRequest("id", ()), [("x-torchere-priority", "-1")]).priority == -1
    assert prioritised(InferRequest("id", ())).priority == 0
