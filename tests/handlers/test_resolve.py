from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.handlers.built_in import BUILT_IN_HANDLERS, ENVELOPES
from torchere.handlers.errors import HandlerLoadError, PredictionException
from torchere.handlers.resolve import load_entry_point

WriteArchive = Callable[..., Path]

CLASS_FORM = """
class Handler:
    def initialize(self, context):
        self.name = context.model_name
    def handle(self, data, context):
        return [self.name] * len(data)
"""


def test_a_file_with_one_class_is_a_handler(write_archive: WriteArchive, make_context: Any) -> None:
    context = make_context(write_archive(dict.fromkeys(["my.py", "llama-handler.py", "3d.py"], CLASS_FORM)))
    same = ("my.py", "my.py:", "my::x", "./my.py", "my.py:nothing", "folder/my.py")
    for handler in (*same, "llama-handler.py", "3d"):
        assert load_entry_point(handler, context)([{}, {}], context) == ["m", "m"]


@pytest.mark.parametrize("folder", ["code", "model_code", "test", "a/b"])
def test_a_handler_in_a_folder_imports_the_files_beside_it_and_those_at_the_top(
    write_archive: WriteArchive, make_context: Any, folder: str
) -> None:
    code = """
        from helper import BESIDE
        import top
        def handle(data, context):
            import late
            return [BESIDE, top.NAME, late.NAME]
    """
    files = {
        f"{folder}/inference.py": code,
        f"{folder}/helper.py": "BESIDE = 'beside'",
        f"{folder}/late.py": "NAME = 'late'",
        "helper.py": "BESIDE = 'at the top'",
        "top.py": "NAME = 'top'",
        "inference.py": "def handle(data, context): return ['another']",
    }
    context = make_context(write_archive(files))
    entry_point = load_entry_point(f"{folder}/inference.py:handle", context)
    assert entry_point([{}] * 3, context) == ["beside", "top", "late"]


def test_a_function_is_called_once_without_data_and_then_with(
    write_archive: WriteArchive, make_context: Any
) -> None:
    code = """
        calls = []
        def handle(data, context):
            calls.append(data)
            return data and [len(calls)]
        def other(data, context):
            return ["other"]
    """
    context = make_context(write_archive({"my.py": code}))
    assert load_entry_point("my.py", context)([{}], context) == [2]
    assert load_entry_point("my:other", context)([{}], context) == ["other"]


def test_the_class_imported_from_elsewhere_does_not_count(
    write_archive: WriteArchive, make_context: Any
) -> None:
    code = (
        "from ts.torch_handler.base_handler import BaseHandler\nfrom collections import OrderedDict\n"
        + CLASS_FORM
    )
    context = make_context(write_archive({"my.py": code}))
    assert load_entry_point("my.py", context)([{}], context) == ["m"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", r"Expected only one class .*found: none.*my\.py has no function 'handle'.*; define either"),
        ("class A: pass\nclass B: pass", r"found: A, B.*move the others to a file beside it"),
        ("class A:\n    def initialize(self, c): pass", "no method 'handle'"),
        ("class A:\n    def handle(self, d, c): pass", "no method 'initialize'"),
        ("handle = 3", "'handle' in .* is not callable"),
        ("def handle(:", r"my\.py is not valid Python: .* in line 1"),
        (
            "import not_there",
            r"my\.py was found, but its code imports 'not_there'.*--extra-files.*install_py_dep",
        ),
        ("from json import not_there", r"my\.py was found, but an import in its code failed"),
        ("def handle(data, c): return len(data)", r"'handle' in .*my\.py .* data=None, as TorchServe does"),
        ("class A:\n    def __init__(self, x): pass\n    handle = initialize = print", "without arguments"),
        (
            "def handle(data): return data",
            r"'handle' in .*my\.py takes \(data\); expected",
        ),
        (
            "class A:\n    def initialize(self): pass\n    handle = print",
            "'initialize' of .* expected",
        ),
        (
            "class A:\n    initialize = print\n    def handle(self, d): pass",
            "'handle' of .* expected",
        ),
    ],
)
def test_a_wrong_file_is_explained(
    write_archive: WriteArchive, make_context: Any, code: str, message: str
) -> None:
    with pytest.raises(HandlerLoadError, match=message):
        load_entry_point("my.py", make_context(write_archive({"my.py": code})))


def test_a_class_in_place_of_a_function_is_explained(write_archive: WriteArchive, make_context: Any) -> None:
    context = make_context(write_archive({"my.py": CLASS_FORM}))
    with pytest.raises(HandlerLoadError, match=r"'Handler' in .*my\.py is a class.*leave ':Handler' out"):
        load_entry_point("my.py:Handler", context)


def test_a_decorator_may_take_other_arguments_than_what_it_wraps(
    write_archive: WriteArchive, make_context: Any
) -> None:
    code = """
        import functools
        def alone(method):
            @functools.wraps(method)
            def without_context(self, data, context):
                return method(self, data)
            return without_context
        class Handler:
            @staticmethod
            def initialize(context): pass
            @alone
            def handle(self, data): return ["alone"]
    """
    context = make_context(write_archive({"my.py": code}))
    assert load_entry_point("my.py", context)([{}], context) == ["alone"]


def test_the_cause_inside_the_users_file_is_kept(write_archive: WriteArchive, make_context: Any) -> None:
    context = make_context(write_archive({"my.py": "import helper", "helper.py": "import not_there"}))
    with pytest.raises(HandlerLoadError, match="imports 'not_there'") as caught:
        load_entry_point("my.py", context)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_missing_sibling_is_not_taken_for_a_missing_handler(
    write_archive: WriteArchive, make_context: Any
) -> None:
    context = make_context(write_archive({"my.py": "import pkg.absent", "pkg/__init__.py": ""}))
    with pytest.raises(HandlerLoadError, match=r"my\.py was found, but its code imports 'pkg\.absent'"):
        load_entry_point("my.py", context)


def test_a_library_in_the_handlers_place_is_named(write_archive: WriteArchive, make_context: Any) -> None:
    context = make_context(write_archive({"ok.so": "no library"}))
    with pytest.raises(HandlerLoadError, match=r"file ok\.so was found, but it can't be imported: .*ok\.so"):
        load_entry_point("ok.so", context)


def test_what_initialize_raises_comes_through(write_archive: WriteArchive, make_context: Any) -> None:
    code = CLASS_FORM.replace("self.name = context.model_name", "raise RuntimeError('CUDA out of memory')")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        load_entry_point("my.py", make_context(write_archive({"my.py": code})))


@pytest.mark.parametrize(
    "handler", ["../my.py", "/etc/my.py", "a/../../my.py", "", ":", ":my", "my handler", "a;b"]
)
def test_paths_that_leave_the_archive_are_refused(tmp_path: Path, make_context: Any, handler: str) -> None:
    (tmp_path / "my.py").write_text(CLASS_FORM)
    (tmp_path / "archive").mkdir()
    with pytest.raises(HandlerLoadError, match="can't be used"):
        load_entry_point(handler, make_context(tmp_path / "archive"))


@pytest.mark.parametrize(
    "handler", ["os:system", "subprocess:call", "json", "torchere.handlers.base", "nope.py"]
)
def test_modules_of_the_process_are_not_handlers(tmp_path: Path, make_context: Any, handler: str) -> None:
    with pytest.raises(HandlerLoadError, match=r"neither a file of the archive .* nor one of base_handler"):
        load_entry_point(handler, make_context(tmp_path))


def test_an_archive_file_named_like_a_module_of_the_process_wins(
    write_archive: WriteArchive, make_context: Any
) -> None:
    context = make_context(write_archive({"json.py": CLASS_FORM}))
    assert load_entry_point("json.py", context)([{}], context) == ["m"]
    assert sys.modules["json"] is json


def test_a_built_in_name_needs_no_file(scripted_doubler: Path, make_context: Any, begin: Any) -> None:
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    for handler in ("base_handler", "base_handler.py", "ts.torch_handler.base_handler"):
        entry_point = load_entry_point(handler, context)
        begin(context, 1)
        assert entry_point([[1.0, 2.0]], context) == [[2.0, 4.0]]
        assert entry_point.warmup_data() is None


LATE = """
import asyncio

class Handler:
    def initialize(self, context):
        pass
    async def handle(self, data, context):
        await asyncio.sleep(0.01)
        return data
"""


def test_coroutines_answer_in_an_envelope_one_by_one_and_several_at_once(
    write_archive: WriteArchive, make_context: Any, begin: Any
) -> None:
    context = make_context(write_archive({"late.py": LATE}))
    entry_point = load_entry_point("late.py", context, envelope="json")
    begin(context, 1)
    batches = [[{"body": {"instances": instances}}] for instances in ([1], [2, 3, 4])]
    answers = [['{"predictions": [1]}'], ['{"predictions": [2, 3, 4]}']]
    assert [entry_point(batch, context) for batch in batches] == answers

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(entry_point.begin(batch, context) for batch in batches))  # type: ignore[call-overload]

    assert entry_point.loop.run_until_complete(at_once()) == answers


BOUND = """
import asyncio

made_on = []

async def handle(data, context):
    made_on.append(asyncio.get_running_loop())
    return data and [made_on[0] is made_on[-1]] * len(data)
"""


@pytest.mark.parametrize("envelope", [None, "body"])
def test_a_function_is_loaded_and_called_on_one_event_loop(
    write_archive: WriteArchive, make_context: Any, begin: Any, envelope: str | None
) -> None:
    context = make_context(write_archive({"bound.py": BOUND}))
    entry_point = load_entry_point("bound.py", context, envelope=envelope)
    begin(context, 1)
    assert entry_point([{"body": 1}], context) == [True]


def test_every_built_in_name_leads_to_a_class() -> None:
    for home in (*BUILT_IN_HANDLERS.values(), *ENVELOPES.values()):
        module, name = home.split(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.parametrize("handler", ["vllm_handler", "trt_llm_handler", "text_handler"])
def test_a_handler_we_do_not_ship_says_why(tmp_path: Path, make_context: Any, handler: str) -> None:
    with pytest.raises(HandlerLoadError, match=f"'{handler}' is not built in here: it "):
        load_entry_point(handler, make_context(tmp_path))


def test_an_envelope_stands_before_the_handler(scripted_doubler: Path, make_context: Any, begin: Any) -> None:
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    entry_point = load_entry_point("base_handler", context, envelope="json")
    begin(context, 1)
    assert entry_point([{"body": {"instances": [1.0, 2.0]}}], context) == ['{"predictions": [2.0, 4.0]}']


def test_an_unknown_envelope_is_an_error_at_load(scripted_doubler: Path, make_context: Any) -> None:
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    with pytest.raises(HandlerLoadError, match="expected one of body, json, kserve, kservev2"):
        load_entry_point("base_handler", context, envelope="jsno")


def test_example_rows_are_the_handlers_own_and_not_for_envelopes(
    write_archive: WriteArchive, make_context: Any
) -> None:
    code = CLASS_FORM + "    def warmup_data(self):\n        return [{'body': b'x'}]\n"
    context = make_context(write_archive({"my.py": code}))
    assert load_entry_point("my.py", context).warmup_data() == [{"body": b"x"}]
    assert load_entry_point("my.py", context, envelope="body").warmup_data() is None


def test_example_rows_of_a_base_class_are_the_archives_own_too_but_not_while_runs_are_profiled(
    write_archive: WriteArchive, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = CLASS_FORM + "    def warmup_data(self):\n        return [{}]\n"
    derived = "from base import Handler\nclass Derived(Handler):\n    pass\n"
    entry_point = load_entry_point("my.py", make_context(write_archive({"base.py": base, "my.py": derived})))
    assert entry_point.warmup_data() == [{}]
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")  # each run would leave a trace
    assert entry_point.warmup_data() is None


def test_an_asynchronous_handler_is_waited_for_on_one_loop(
    write_archive: WriteArchive, make_context: Any
) -> None:
    code = """
        import asyncio
        class Handler:
            loops = set()
            def initialize(self, context): pass
            async def handle(self, data, context):
                await asyncio.sleep(0)
                self.loops.add(id(asyncio.get_running_loop()))
                return [len(self.loops)]
    """
    context = make_context(write_archive({"my.py": code}))
    entry_point = load_entry_point("my.py", context)
    assert entry_point([{}], context) == entry_point([{}], context) == [1]


def test_a_replaced_handle_method_is_used(write_archive: WriteArchive, make_context: Any) -> None:
    code = CLASS_FORM + "    def __init__(self):\n        self.handle = lambda data, context: ['replaced']\n"
    context = make_context(write_archive({"my.py": code}))
    assert load_entry_point("my.py", context)([{}], context) == ["replaced"]


class TestConformanceHandlers:
    """The handlers that the recorded answers of TorchServe were made with."""

    def test_echo(self, conformance_handlers: Path, make_context: Any, begin: Any) -> None:
        context = make_context(conformance_handlers, name="echo")
        entry_point = load_entry_point("echo.py", context)
        begin(context, 1, **{"x-test-header": "h"})
        seen = {"body": {"type": "bytearray", "len": 3, "head": "616263"}}
        answers = entry_point([{"body": bytearray(b"abc")}], context)
        assert answers == [{"batch": 1, "seen": seen, "header": "h"}]

    def test_function_handler(self, conformance_handlers: Path, make_context: Any, begin: Any) -> None:
        context = make_context(conformance_handlers, name="func", version="2.1")
        entry_point = load_entry_point("function_handler.py", context)
        begin(context, 1)
        assert entry_point([{}], context) == [{"rows": 1, "model": "func", "version": "2.1"}]

    def test_broken_init(self, conformance_handlers: Path, make_context: Any) -> None:
        with pytest.raises(RuntimeError, match="cannot initialise"):
            load_entry_point("broken_init.py", make_context(conformance_handlers, name="broken"))

    def test_json_tensor(
        self, conformance_handlers: Path, scripted_doubler: Path, make_context: Any, begin: Any
    ) -> None:
        code = (conformance_handlers / "json_tensor.py").read_bytes()
        (scripted_doubler / "json_tensor.py").write_bytes(code)
        context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
        entry_point = load_entry_point("json_tensor.py", context)
        begin(context, 2)
        rows = [{"body": {"x": [1, 2]}}, {"data": bytearray(b'{"x": [3, 4]}')}]
        assert entry_point(rows, context) == [{"y": [2.0, 4.0]}, {"y": [6.0, 8.0]}]
        assert [sample.name for sample in context.metrics.drain()] == ["HandlerTime"]

    def test_rich(self, conformance_handlers: Path, make_context: Any, begin: Any) -> None:
        context = make_context(conformance_handlers, name="rich")
        entry_point = load_entry_point("rich.py", context)

        def answer(mode: str) -> Any:
            return entry_point([{"body": {"mode": mode}}], context)

        partials = begin(context, 1)
        assert answer("stream") == ["end"]
        assert partials == [(0, b"part0 "), (0, b"part1 "), (0, b"part2 ")]
        begin(context, 1)
        assert answer("header") == ['{"ok": true}']
        assert context.get_response_headers(0) == {
            "content-type": "application/vnd.test+json",
            "x-answer": "42",
        }
        assert answer("status") == ["short"]
        assert context.get_response_status(0) == (418, "teapot")
        assert answer("metric") == ["counted"]
        assert [s.name for s in context.metrics.drain()] == ["TestCounter", "TestTimer"]
        assert torch.equal(answer("tensor"), torch.ones(1, 2))
        with pytest.raises(PredictionException, match="no such thing : 513"):
            answer("prediction_exception")


def test_the_operators_default_handler_may_be_an_installed_module(
    tmp_path: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "serving_container_of_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "service.py").write_text("def handle(data, context):\n    return data and ['installed']\n")
    monkeypatch.syspath_prepend(package.parent)
    (tmp_path / "model").mkdir()
    context = make_context(tmp_path / "model")
    name = "serving_container_of_a_test.service:handle"
    with pytest.raises(HandlerLoadError, match="neither a file of the archive"):
        load_entry_point(name, context)
    assert load_entry_point(name, context, installed=True)([{"body": b""}], context) == ["installed"]
    with pytest.raises(HandlerLoadError, match="install its package"):
        load_entry_point("no_such_package_here.service", context, installed=True)


def test_the_operators_default_handler_may_be_sagemakers_without_its_toolkit(
    tmp_path: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")  # the script's folder is added: servers of later tests would find it
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text("def model_fn(folder): return folder\n")
    name = "sagemaker_pytorch_serving_container.handler_service:handle"
    entry_point = load_entry_point(name, make_context(tmp_path / "model"), installed=True)
    assert type(entry_point.instance).__name__ == "SageMakerHandler"
    sys.modules.pop("inference", None)


def test_the_operators_default_handler_may_be_a_file_anywhere(
    tmp_path: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SageMaker's inference toolkit names its own, by the path of an installed module's file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_json.py").write_text("WORD = 'beside'\n")
    (tmp_path / "json.py").write_text(  # a name that is taken
        "import beside_json\nclass Service:\n    def initialize(self, context): pass\n"
        "    def handle(self, data, context): return [beside_json.WORD] * len(data)\n"
    )
    (tmp_path / "model").mkdir()
    context = make_context(tmp_path / "model")
    name = f"{tmp_path}/json.py:handle"
    with pytest.raises(HandlerLoadError, match="paths that leave the archive are refused"):
        load_entry_point(name, context)
    assert load_entry_point(name, context, installed=True)([{"body": b""}], context) == ["beside"]
    with pytest.raises(HandlerLoadError, match=r"gone\.py can't be imported"):
        load_entry_point(f"{tmp_path}/gone.py", context, installed=True)


def test_a_file_that_fails_leaves_no_half_module_behind(
    tmp_path: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for error in ("ImportError", "RuntimeError"):
        (tmp_path / "half_a_handler.py").write_text(f"raise {error}('no')\n")
        with pytest.raises((HandlerLoadError, RuntimeError), match="no"):
            load_entry_point(f"{tmp_path}/half_a_handler.py", make_context(tmp_path), installed=True)
        assert "half_a_handler" not in sys.modules
