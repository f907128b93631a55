from __future__ import annotations

import json
import linecache
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest

from torchere.handlers.archive_import import (
    ROOT,
    ArchiveModules,
    archive_at,
    forget_archive,
    open_archive,
)

WriteArchive = Callable[..., Path]
_opened: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    while _opened:
        forget_archive(_opened.pop())


def _open(directory: Path, model: str = "a") -> ArchiveModules:
    _opened.append(str(directory))
    return open_archive(model, "1.0", str(directory))


def test_two_archives_hold_different_code_under_one_name(write_archive: WriteArchive) -> None:
    files = {"handler.py": "import model\nfrom model import NAME\nVALUE = (model.NAME, NAME)\n"}
    first = _open(write_archive({**files, "model.py": "NAME = 'first'"}), "a")
    second = _open(write_archive({**files, "model.py": "NAME = 'second'"}), "b")
    assert first.load("handler").VALUE == ("first", "first")
    assert second.load("handler").VALUE == ("second", "second")
    assert "model" not in sys.modules
    assert "handler" not in sys.modules


def test_a_module_is_run_once_and_shared_by_all_that_import_it(write_archive: WriteArchive) -> None:
    archive = _open(write_archive({"state.py": "", "one.py": "import state", "two.py": "import state"}))
    assert archive.load("one").state is archive.load("two").state is archive.load("state")


def test_an_archive_may_shadow_the_standard_library_for_itself_only(write_archive: WriteArchive) -> None:
    archive = _open(
        write_archive({"json.py": "dumps = None", "handler.py": "import json, string\nimport logging.config"})
    )
    handler = archive.load("handler")
    assert handler.json.dumps is None
    assert handler.string is sys.modules["string"]
    assert sys.modules["json"] is json
    assert json.dumps([1]) == "[1]"


def test_packages_of_an_archive_work_in_every_spelling(write_archive: WriteArchive) -> None:
    archive = _open(
        write_archive(
            {
                "nets/__init__.py": "from nets.blocks import Block\nfrom . import blocks as relative",
                "nets/blocks.py": "class Block: pass",
                "nets/deep/__init__.py": "",
                "nets/deep/leaf.py": "from ..blocks import Block",
                "handler.py": """
                    import nets
                    import nets.deep.leaf
                    import nets.deep.leaf as leaf
                    from nets import blocks, Block
                    from nets.blocks import *
                    from nets.deep import leaf as other
                """,
            }
        )
    )
    handler = archive.load("handler")
    assert handler.nets.deep.leaf is handler.leaf is handler.other
    assert handler.Block is handler.blocks.Block is handler.leaf.Block is handler.nets.relative.Block
    assert handler.nets.__name__ == f"{archive.prefix}.nets"


def test_imports_inside_functions_and_by_name_look_into_the_archive_too(write_archive: WriteArchive) -> None:
    archive = _open(
        write_archive(
            {
                "late.py": "VALUE = 1",
                "handler.py": """
                    def inside():
                        import late
                        return late.VALUE
                    def by_name():
                        return __import__("late").VALUE
                    class Handler:
                        def method(self):
                            from late import VALUE
                            return VALUE
                """,
            }
        )
    )
    handler = archive.load("handler")
    assert handler.inside() == handler.by_name() == handler.Handler().method() == 1
    assert "late" not in sys.modules


def test_a_directory_without_init_is_a_package_unless_the_process_has_one(
    write_archive: WriteArchive,
) -> None:
    archive = _open(
        write_archive(
            {"parts/x.py": "V = 1", "json/x.py": "", "data/a.csv": "1", "handler.py": "import json"}
        )
    )
    assert archive.owns("parts")
    assert not archive.owns("json")
    assert not archive.owns("data")
    assert archive.load("handler").json is json


def test_a_missing_module_is_reported_under_the_name_the_code_used(write_archive: WriteArchive) -> None:
    archive = _open(write_archive({"handler.py": "import nowhere_to_be_found"}))
    with pytest.raises(ModuleNotFoundError) as caught:
        archive.load("handler")
    assert caught.value.name == "nowhere_to_be_found"
    with pytest.raises(ModuleNotFoundError) as caught:
        archive.load("absent")
    assert caught.value.name == f"{archive.prefix}.absent"


def test_classes_can_be_pickled_and_resources_read(write_archive: WriteArchive) -> None:
    archive = _open(write_archive({"pkg/__init__.py": "class Row: pass", "pkg/words.txt": "one two"}))
    package = archive.load("pkg")
    assert isinstance(pickle.loads(pickle.dumps(package.Row())), package.Row)
    assert resources.files(package).joinpath("words.txt").read_text() == "one two"


def test_forgetting_drops_every_module_and_the_next_one_starts_afresh(write_archive: WriteArchive) -> None:
    directory = write_archive({"model.py": "NAME = 'old'"})
    old = _open(directory).load("model")
    forget_archive(str(directory))
    assert not [name for name in sys.modules if name.startswith(f"{ROOT}.a.")]
    (directory / "model.py").write_text("NAME = 'new one'")
    assert _open(directory).load("model").NAME == "new one"
    assert old.NAME == "old"


def test_nothing_in_the_process_remembers_an_archive_that_was_forgotten(write_archive: WriteArchive) -> None:
    directory = write_archive({"model.py": "from parts.one import fail", "parts/one.py": "def fail(): 1 / 0"})
    archive = _open(directory, "only here")
    with pytest.raises(ZeroDivisionError) as raised:
        archive.load("model").fail()
    assert "1 / 0" in "".join(traceback.format_exception(raised.value))
    forget_archive(str(directory))
    kept = [*sys.path_importer_cache, *linecache.cache]
    assert not [place for place in kept if place.startswith(archive.model_dir)]
    assert archive.prefix.rpartition(".")[0] not in sys.modules


def test_what_was_typed_in_is_in_nobodys_way(
    write_archive: WriteArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed_in = compile("1", "<stdin>", "eval")
    monkeypatch.setitem(linecache.cache, typed_in, (1, None, ["1"], "<stdin>"))  # type: ignore[misc]
    archive = _open(write_archive({"model.py": "N = 1"}), "typed in")
    assert archive.load("model").N == 1
    forget_archive(archive.model_dir)
    assert typed_in in linecache.cache


def test_a_model_keeps_its_package_while_another_version_is_there(write_archive: WriteArchive) -> None:
    source = {"model.py": "def late():\n    import helper\n    return helper.N", "helper.py": "N = 2"}
    old, new = _open(write_archive({"model.py": ""})), _open(write_archive(source))
    late = new.load("model").late
    forget_archive(old.model_dir)
    assert late() == 2


def test_an_archive_is_found_by_its_folder_whether_it_was_opened_or_not(write_archive: WriteArchive) -> None:
    directory, other = write_archive({"model.py": ""}), write_archive({"model.py": "NAME = 'other'"})
    opened = _open(directory)
    assert archive_at(str(directory)) is opened
    assert archive_at(str(other)).load("model").NAME == "other"
    assert archive_at(str(other)) is archive_at(str(other)) is not opened
    forget_archive(str(other))


def test_what_was_opened_too_late_to_be_forgotten_goes_when_its_folder_is_gone(
    write_archive: WriteArchive,
) -> None:
    directory = write_archive({"model.py": "N = 1"})
    late = _open(directory)
    late.load("model")
    shutil.rmtree(directory)
    assert _open(write_archive({"model.py": "N = 2"})).prefix == late.prefix
    assert f"{late.prefix}.model" not in sys.modules


def test_forgetting_what_was_never_there_changes_nothing() -> None:
    before = set(sys.modules)
    forget_archive("/never")
    assert set(sys.modules) == before


def test_a_version_that_comes_back_and_the_one_that_still_answers_keep_their_own_modules(
    write_archive: WriteArchive,
) -> None:
    handler = "def late():\n    import helper\n    return helper.N"
    directories = [write_archive({"h.py": handler, "helper.py": f"N = {n}"}) for n in (1, 2, 3)]
    old, new = (_open(directory).load("h") for directory in directories[:2])
    assert (old.late(), new.late()) == (1, 2)
    forget_archive(str(directories[0]))
    del sys.modules[f"{new.__package__}.helper"]
    assert new.late() == 2
    assert _open(directories[2]).load("h").late() == 3


def test_names_that_differ_only_in_punctuation_do_not_meet(write_archive: WriteArchive) -> None:
    first = _open(write_archive({"model.py": "N = 1"}), "my-model")
    second = _open(write_archive({"model.py": "N = 2"}), "my_model")
    assert (first.load("model").N, second.load("model").N) == (1, 2)
    assert all(part.isidentifier() for part in first.prefix.split("."))


def test_nothing_is_written_into_the_archive_nor_onto_the_path(write_archive: WriteArchive) -> None:
    directory = write_archive({"model.py": "N = 1"})
    before = list(sys.path)
    _open(directory).load("model")
    assert [item.name for item in directory.iterdir()] == ["model.py"]
    assert sys.path == before


def test_many_threads_import_one_copy(write_archive: WriteArchive) -> None:
    directory = write_archive({"model.py": "import helper\nN = object()", "helper.py": "N = object()"})
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: _open(directory).load("model"), range(16)))
    assert all(module is modules[0] for module in modules)


def test_importlib_inside_an_archive_looks_into_it_too(write_archive: WriteArchive) -> None:
    archive = _open(
        write_archive(
            {
                "model.py": "N = 1",
                "handler.py": """
                    import importlib
                    import importlib.util
                    from importlib import import_module, resources
                    own = importlib.import_module("model")
                    also = import_module("model")
                    other = importlib.import_module("json")
                    found = importlib.util.find_spec("json").name
                """,
            }
        )
    )
    handler = archive.load("handler")
    assert handler.own is handler.also is archive.load("model")
    assert handler.other is json
    assert handler.found == "json"
    assert handler.resources is resources
    assert "model" not in sys.modules


def test_an_archive_opens_while_other_threads_import(write_archive: WriteArchive) -> None:
    directory = write_archive({"model.py": "value = 1"})
    sys.path_importer_cache[str(directory)] = None  # as if it had been looked at before it was there
    stop = threading.Event()

    def grow() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            sys.path_importer_cache[f"/nowhere/{number % 500}"] = None
            sys.path_importer_cache.pop(f"/nowhere/{(number * 7) % 500}", None)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for number in range(50):
            archive = open_archive("busy", str(number), str(directory))
            assert archive.load("model").value == 1
            forget_archive(str(directory))
    finally:
        stop.set()
        thread.join()
        for number in range(500):
            sys.path_importer_cache.pop(f"/nowhere/{number}", None)


def test_what_a_handler_writes_can_be_imported(write_archive: Callable[..., Path]) -> None:
    source = """
from pathlib import Path
try:
    import written_later
except ImportError:
    Path(__file__).with_name("written_later.py").write_text("V = 7")
    import written_later
"""
    archive = open_archive("writer", "1.0", str(write_archive({"m.py": source})))
    assert archive.load("m").written_later.V == 7
