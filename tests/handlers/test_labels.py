from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchere.handlers.labels import load_label_mapping, map_class_to_label


def _mapping(tmp_path: Path, content: object) -> dict[str, str] | None:
    path = tmp_path / "index_to_name.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_label_mapping(str(path))


def test_a_missing_file_means_no_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert load_label_mapping(str(tmp_path / "index_to_name.json")) is None
    assert "will not include class name" in caplog.text


def test_names_and_lists_of_names_are_read(tmp_path: Path) -> None:
    assert _mapping(tmp_path, {"0": "cat", "1": ["n02", "dog"]}) == {"0": "cat", "1": "dog"}


def test_the_older_form_is_read(tmp_path: Path) -> None:
    assert _mapping(tmp_path, {"object_type_names": ["a", "b"]}) == {"0": "a", "1": "b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["cat"], "holds a list"),
        ({"0": 1}, "has 1 at '0'"),
        ({"0": []}, "at '0'"),
        ("{broken", "not valid JSON"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _mapping(tmp_path, content)


def test_names_are_put_to_numbers() -> None:
    assert map_class_to_label([[0.9, 0.1]], {"0": "cat", "3": "dog"}, [[3, 0]]) == [{"dog": 0.9, "cat": 0.1}]
    assert map_class_to_label([[0.9, 0.1], [0.2, 0.8]]) == [{"0": 0.9, "1": 0.1}, {"0": 0.2, "1": 0.8}]


def test_the_best_of_classes_that_share_a_name_is_the_one_that_is_told() -> None:
    names = {"134": "crane", "517": "crane", "7": "cock"}
    assert map_class_to_label([[0.9, 0.06, 0.04]], names, [[134, 7, 517]]) == [{"crane": 0.9, "cock": 0.06}]
    assert map_class_to_label([[0.1, 0.9]], {"0": "spam", "1": "spam"}) == [{"spam": 0.9}]


def test_a_class_without_a_name_is_reported() -> None:
    with pytest.raises(KeyError, match="class 7"):
        map_class_to_label([[1.0]], {"0": "cat"}, [[7]])


def test_the_arguments_are_typed() -> None:
    with pytest.raises(TypeError, match="Convert classes to list"):
        map_class_to_label(((1.0,),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a dict"):
        map_class_to_label([[1.0]], ["cat"])  # type: ignore[arg-type]
