"""What can be decided about a request before a file is opened."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchere.archiver.errors import PackingError
from torchere.archiver.request import BUILT_IN_HANDLERS, ArchiveRequest
from torchere.handlers import built_in, resolve
from torchere.handlers.errors import HandlerLoadError


def request_of(handler: str = "base_handler", **fields: Any) -> ArchiveRequest:
    return ArchiveRequest(**{"model_name": "m", "version": "1", "handler": handler, **fields})


@pytest.mark.parametrize("name", ["m", "0", "Resnet-18_v1.5"])
def test_an_ordinary_model_name_is_accepted(name: str) -> None:
    request = request_of(model_name=name)
    request.check()
    assert request.target == Path(f"{name}.mar")


@pytest.mark.parametrize("name", ["", "-m", ".m", "a b", "a/b", "ü", "m\n"])
def test_a_model_name_with_special_characters_is_refused_with_the_known_text(name: str) -> None:
    with pytest.raises(PackingError) as caught:
        request_of(model_name=name).check()
    assert str(caught.value) == (
        "Model name contains special characters.\n"
        r"The allowed regular expression filter for model name is: ^[A-Za-z0-9][A-Za-z0-9_\-.]*$"
    )


@pytest.mark.parametrize(("name", "file"), [("n.", "n..mar"), ("n..v2", "n..v2.mar")])
def test_a_model_name_of_which_no_server_loads_the_archive_is_refused(name: str, file: str) -> None:
    with pytest.raises(PackingError, match=f"^{re.escape(file)}: no server loads .* two dots"):
        request_of(model_name=name).check()
    request_of(model_name=name, output="other.mar").check()
    request_of(model_name="n.", archive_format="no-archive").check()


@pytest.mark.parametrize("fields", [{"runtime": "ruby"}, {"archive_format": "rar"}])
def test_an_unknown_choice_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PackingError, match="use one of"):
        request_of(**fields).check()


@pytest.mark.parametrize(
    ("handler", "file"),
    [
        ("image_classifier", None),
        ("service.py", "service.py"),
        ("src/service.py:handle", "src/service.py"),
        ("src/service:handle", "src/service.py"),
        ("src/service", "src/service.py"),
        ("C:/src/service.py", "C:/src/service.py"),
        ("C:/src/service:handle", "C:/src/service.py"),
        ("src/service:Handler.handle", "src/service.py"),
        ("src/service::handle", "src/service.py"),
        ("src/service.py:", "src/service.py"),
        (".", ".py"),
        ("", None),
    ],
)
def test_a_handler_names_its_file(handler: str, file: str | None) -> None:
    assert request_of(handler).handler_file() == (Path(file) if file else None)


@given(st.lists(st.sampled_from(["a", "service", ".py", ":", "/", "-", "é", "C:"]), max_size=7).map("".join))
@example("service.py:x.py")
@example("service.py:")
def test_the_server_looks_for_the_file_that_was_packed(handler: str) -> None:
    request = request_of(handler)
    try:
        module = resolve._module_name(request.manifest({}).handler or "")
    except HandlerLoadError:
        return  # of these the server says itself what is wrong
    packed = request.handler_file()
    assert packed is not None
    assert packed.name == f"{module}.py"


def test_an_archive_may_leave_the_handler_to_the_server() -> None:
    assert "handler" not in json.loads(request_of("").manifest({}).dump())["model"]


def test_the_handlers_that_need_no_file_are_those_of_the_server() -> None:
    assert sorted(built_in.BUILT_IN_HANDLERS) == list(BUILT_IN_HANDLERS)


@pytest.mark.parametrize("handler", [*BUILT_IN_HANDLERS, "dali_image_classifier", "vllm_handler"])
def test_a_handler_of_the_server_or_of_torchserve_needs_no_file(handler: str) -> None:
    assert request_of(handler).handler_file() is None


def test_a_cpp_handler_is_a_shared_library() -> None:
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    assert request_of("lib/libh:Handler", runtime="LSP").handler_file() == Path(f"lib/libh{suffix}")
    assert request_of("TorchScriptHandler", runtime="LSP").handler_file() is None


@pytest.mark.parametrize(
    ("archive_format", "name"),
    [("default", "m.mar"), ("zip-store", "m.mar"), ("tgz", "m.tar.gz"), ("no-archive", "m")],
)
def test_the_format_decides_the_name(archive_format: str, name: str) -> None:
    assert request_of(archive_format=archive_format, export_path="out").target == Path("out", name)


def test_the_manifest_names_files_by_their_base_names() -> None:
    request = request_of("src/service.py:handle", serialized_file="w/model.pt", model_file=Path("a/model.py"))
    manifest = request.manifest({})
    assert (manifest.handler, manifest.serialized_file, manifest.model_file) == (
        "service.py:handle",
        "model.pt",
        "model.py",
    )


def test_an_empty_version_is_no_version() -> None:
    assert request_of(version="").manifest({}).model_version == "1.0"
