from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.context import send_intermediate_predict_response as send


def test_each_element_is_encoded_like_a_final_answer(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    partials = begin(context, 2)
    send(["a", {"b": 1}], context.request_ids, "Intermediate", 200, context)
    assert partials == [(0, b"a"), (1, b'{\n  "b": 1\n}')]


def test_other_ranks_than_the_first_send_nothing(
    make_context: Any, begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    context = make_context(tmp_path)
    partials = begin(context, 1)
    send(["a"], context.request_ids, "", 200, context)
    assert partials == []


@pytest.mark.parametrize(
    ("parts", "text"),
    [(["a", "b"], "2 partial answers for a batch of 3"), (["a", "b", "c"], "KeyError: 'gone'")],
)
def test_parts_that_do_not_fit_the_batch_are_refused_before_any_is_sent(
    make_context: Any, begin: Any, tmp_path: Path, parts: list[str], text: str
) -> None:
    context = make_context(tmp_path)
    partials = begin(context, 2)
    with pytest.raises(ValueError, match=text):
        send(parts, {**context.request_ids, 2: "gone"}, "", 200, context)
    assert partials == []


def test_parts_go_to_the_requests_that_the_map_names(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    partials = begin(context, 3)
    send(["c"], {0: context.request_ids[2]}, "", 200, context)  # of a micro-batch, with indices of its own
    more: dict[Any, Any] = {"more": object(), 0: "a", 1: "b"}
    send(more, {0: context.request_ids[0]}, "", 200, context)
    send(["b", "padding"], {0: context.request_ids[1]}, "", 200, context)
    assert partials == [(2, b"c"), (0, b"a"), (1, b"b")]


def test_a_code_other_than_200_becomes_the_status(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    begin(context, 1)
    send(["a"], context.request_ids, "partly", 206, context)
    assert context.get_response_status(0) == (206, "partly")


def test_a_client_that_takes_no_parts_is_an_error_that_says_so(make_context: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    context.begin_batch([], None)
    with pytest.raises(RuntimeError, match="return the whole answer"):
        context.send_partial(0, b"x")
