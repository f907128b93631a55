from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchere.handlers.errors import PredictionException
from torchere.handlers.rows import read_each, refusal, settings_of
from torchere.handlers.sagemaker.transformer import DefaultPytorchInferenceHandler, Transformer


def test_each_row_is_read_or_keeps_what_is_wrong_with_it() -> None:
    def read(row: int) -> int:
        if row < 0:
            raise PredictionException("negative", 400)
        return row * 2

    one, two, three = read_each([1, -1, 3], read)
    assert (one, three) == (2, 6)
    assert isinstance(two, PredictionException)


def test_a_refusal_sets_the_status_and_the_type_of_its_request_only(
    tmp_path: Path, make_context: Any, begin: Any
) -> None:
    context = make_context(tmp_path)
    begin(context, 2)
    answer = refusal(context, 1, PredictionException("too large", 413))
    assert answer == {"code": 413, "type": "RequestEntityTooLargeException", "message": "too large"}
    assert [context.get_response_status(index)[0] for index in range(2)] == [200, 413]
    assert [context.get_response_content_type(index) for index in range(2)] == [None, "application/json"]


def test_a_request_that_the_script_of_sagemaker_answers_wrongly_fails_alone(
    tmp_path: Path, make_context: Any, begin: Any
) -> None:
    script = ModuleType("inference")
    vars(script)["transform_fn"] = lambda model, body, kind, accept: (body, 7 if body == "bad" else accept)
    transformer = Transformer(DefaultPytorchInferenceHandler())
    transformer._model, transformer._initialized = None, True
    transformer._take_functions(script)
    context = make_context(tmp_path)
    begin(context, 3, accept="text/csv", Accept={"content-type": ""})  # the latter is a form field
    good, bad, other = transformer.transform([{"body": "good"}, {"body": "bad"}, {"body": "other"}], context)
    assert (good, other) == ("good", "other")
    assert "convert it with str()" in bad
    assert [context.get_response_status(index)[0] for index in range(3)] == [200, 500, 200]
    assert context.get_response_content_type(0) == "text/csv"


def test_settings_are_the_defaults_with_what_the_configuration_says() -> None:
    defaults = {"a": 1, "b": 0.5}
    assert settings_of({}, "x", defaults) == defaults
    assert settings_of({"handler": {"x": {"b": 2}, "y": {"a": 5}}}, "x", defaults) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([1], r"handler\.x in model-config\.yaml is \[1\]; expected keys and values"),
        ({"c": 1}, r"handler\.x\.c in model-config\.yaml is unknown; expected one of a, b"),
        ({"a": 0.5}, r"handler\.x\.a in model-config\.yaml is 0\.5; expected a whole number"),
        ({"b": True}, r"handler\.x\.b in model-config\.yaml is True; expected a number"),
    ],
)
def test_settings_of_another_kind_are_refused(block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of({"handler": {"x": block}}, "x", {"a": 1, "b": 0.5})
