"""What is not there is told by its flag, before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.errors import PackingError
from torchere.archiver.request import check_inputs


def told(request: Any) -> str:
    with pytest.raises(PackingError) as caught:
        check_inputs(request)
    return str(caught.value)


def test_files_that_are_there_and_patterns_are_fine(request_for: Any, sources: Path) -> None:
    check_inputs(request_for())
    check_inputs(request_for(handler="image_classifier"))
    check_inputs(request_for(extra_files=(f" {sources}/extra ", "nowhere/*.x")))


@pytest.mark.parametrize("field", ["serialized_file", "model_file", "requirements_file", "config_file"])
def test_a_missing_file_is_told_with_its_flag_and_where_it_was_looked_for(
    request_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    flag = f"--{field.replace('_', '-')}"
    assert told(request_for(**{field: "gone.x"})) == (
        f"{flag} gone.x: no such file in {tmp_path}; check the path"
    )
    assert told(request_for(**{field: "/gone.x"})) == f"{flag} /gone.x: no such file; check the path"


def test_a_path_below_a_file_is_missing_too(request_for: Any, sources: Path) -> None:
    assert "no such file" in told(request_for(config_file=sources / "model.pt" / "c.yaml"))


def test_a_missing_extra_file_is_told(request_for: Any) -> None:
    assert told(request_for(extra_files=("/gone",))) == (
        "--extra-files /gone: no such file or folder; check the path (a comma begins the next one)"
    )


def test_a_handler_that_is_no_file_and_not_built_in_is_told_what_there_is(request_for: Any) -> None:
    assert told(request_for(handler="/x/image_clasifier")) == (
        "--handler /x/image_clasifier: there is no file /x/image_clasifier.py, and no built-in handler of "
        "that name; expected one of base_handler, densenet_handler, image_classifier, image_segmenter, "
        "object_detector, sequence_classifier, tensor, text_classifier, text_embedding, voice_activity, or a "
        "Python file: check the spelling or the path"
    )
    assert told(request_for(handler="/x/libh:Handler", runtime="LSP")).endswith(
        "; give the path of a shared library"
    )
