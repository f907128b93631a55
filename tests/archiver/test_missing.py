"""Files that a request lacks are told by their flags, before anything is packed."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.cli import check_weights
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


NO_CLASS = (
    "the handler 'image_classifier' expects TorchScript, a .pt2, ONNX, or weights with their class: give the "
    "file of the class (--model-file), or convert the model (--format torchscript)"
)


def weights_at(path: Path, record: str) -> Path:
    """A file with a record of `torch.save` or of TorchScript; "": a pickle of earlier versions of torch."""
    if not record:
        path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
        return path
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"m/{record}", pickle.dumps({"a": 1}, protocol=2))
    return path


@pytest.mark.parametrize("name", ["net.pth", "net.pt"])
@pytest.mark.parametrize(("record", "kind"), [("data.pkl", "torch.save"), ("", "pickle")])
def test_weights_without_a_class_are_refused_for_a_handler_that_has_none(
    request_for: Any, tmp_path: Path, name: str, record: str, kind: str
) -> None:
    path = weights_at(tmp_path / name, record)
    with pytest.raises(PackingError) as caught:
        check_weights(request_for(serialized_file=path, model_file=None, handler="image_classifier"))
    assert str(caught.value) == (
        f"--serialized-file {path}: found {kind} without the class of its model; {NO_CLASS}"
    )


def test_a_handler_of_ones_own_or_a_class_may_come_with_any_weights(
    request_for: Any, sources: Path, tmp_path: Path
) -> None:
    path = weights_at(tmp_path / "net.pth", "data.pkl")
    check_weights(request_for(serialized_file=path, model_file=None))
    check_weights(request_for(serialized_file=path, model_file=sources / "m.py", handler="image_classifier"))
    check_weights(request_for(serialized_file=None, model_file=None, handler="image_classifier"))
    check_weights(request_for(serialized_file=sources / "model.pt", handler="image_classifier"))


def test_a_model_file_that_no_server_can_import_is_refused_for_a_handler_that_imports_it(
    request_for: Any, sources: Path
) -> None:
    named = {"serialized_file": sources / "model.pt", "model_file": sources / "m.v2.py"}
    with pytest.raises(PackingError, match=r"m\.v2\.py: a server imports it by its name, .* to m_v2\.py for"):
        check_weights(request_for(**named, handler="base_handler"))
    check_weights(request_for(**named))  # a handler of one's own may load it from its path


def test_torchscript_under_a_suffix_that_no_server_loads_is_refused(request_for: Any, tmp_path: Path) -> None:
    request = {"model_file": None, "handler": "base_handler"}
    check_weights(request_for(serialized_file=weights_at(tmp_path / "net.pt", "constants.pkl"), **request))
    path = weights_at(tmp_path / "net.pth", "constants.pkl")
    with pytest.raises(PackingError) as caught:
        check_weights(request_for(serialized_file=path, **request))
    assert str(caught.value) == (
        f"--serialized-file {path}: found TorchScript under the suffix '.pth', and a server expects .pt; "
        "rename the file, or give --format keep"
    )
