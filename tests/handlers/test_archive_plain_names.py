from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import pickle
import py_compile
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.abc import InspectLoader
from pathlib import Path

import pytest

from torchere.handlers.archive_import import ArchiveModules, forget_archive, give_plain_names, open_archive

_OTHER = "import sys\nclass Other: one = 1\nsys.modules[__name__] = Other()\n"
_FILES = {
    "plain_net.py": "from plain_parts import blocks\nclass Net: pass\n",
    "plain_parts/__init__.py": "",
    "plain_parts/blocks.py": "from . import leaf\nclass Block: pass\n",
    "plain_parts/leaf.py": "green = 1\n",
    "plain_other.py": _OTHER,
    "plain_parts/other.py": _OTHER,
    "plain_using.py": "import plain_other as top\nfrom plain_parts import other\ngreen = top.one + 1\n",
    "plain_asking.py": "from plain_parts import none\n",
    "plain_folder/inner.py": "def square(x): return x * x\n",
    "plain_broken.py": "import plain_net\nraise ValueError('broken')\n",
    "plain_reader.py": "import pickle\nfrom plain_net import Net\n"
    "def read(data): return isinstance(pickle.loads(data), Net)\n",
    "json.py": "dumps = None\nclass Encoder: pass\n",
}
_NET = b"cplain_net\nNet\n)\x81."  # what a training script that had `import plain_net` wrote


@pytest.fixture
def archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    before, path = list(sys.meta_path), list(sys.path)
    made = open_archive("plain", "1.0", str(write_archive(_FILES)))
    give_plain_names(made)
    yield made
    sys.meta_path[:] = [item for item in sys.meta_path if item in before]
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("plain_")]:
        del sys.modules[name]
    forget_archive(made.model_dir)


def test_the_plain_name_leads_to_the_archives_own_module(archive: ArchiveModules) -> None:
    module = importlib.import_module("plain_net")
    assert module is archive.load("plain_net")
    assert module.__spec__ is not None
    assert module.__spec__.name == f"{archive.prefix}.plain_net"
    assert importlib.import_module("plain_parts.blocks") is archive.load("plain_parts.blocks")


def test_a_pickle_that_names_the_plain_module_is_read(archive: ArchiveModules) -> None:
    assert type(pickle.loads(_NET)) is archive.load("plain_net").Net


def test_code_of_the_archive_reads_such_a_pickle_itself(archive: ArchiveModules) -> None:
    assert archive.load("plain_reader").read(_NET)


def test_so_it_does_where_the_module_is_there_as_bytecode_only(archive: ArchiveModules) -> None:
    source = Path(archive.model_dir, "plain_net.py")
    py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    source.unlink()
    assert archive.load("plain_reader").read(_NET)


def test_a_folder_that_a_handler_puts_first_on_the_path_is_searched_first(
    archive: ArchiveModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = Path(archive.model_dir)
    for file, text in {
        "helpers.py": "V = 'root'",
        "others.py": "V = 'root'",
        "repo/helpers/__init__.py": "",
        "repo/helpers/general.py": "V = 'repo'",
        "puts.py": f"import sys, others\nsys.path[:0] = [{str(folder / 'repo')!r}, {str(folder)!r}]\n"
        "from helpers.general import V\n",
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    try:
        module = archive.load("puts")
        assert (module.V, module.others.V) == ("repo", "root")
    finally:
        for name in ("helpers", "helpers.general", "others", "puts"):
            sys.modules.pop(name, None)


def test_modules_and_classes_call_themselves_by_their_plain_names(archive: ArchiveModules) -> None:
    module = archive.load("plain_parts.blocks")
    assert (module.__name__, module.Block.__module__) == ("plain_parts.blocks", "plain_parts.blocks")
    assert sys.modules["plain_parts.blocks"] is module
    assert b"plain_parts.blocks" in pickle.dumps(module.Block(), protocol=0)
    assert importlib.reload(module).Block.__module__ == "plain_parts.blocks"


def test_a_name_that_something_else_has_stays_private(archive: ArchiveModules) -> None:
    encoder = archive.load("json").Encoder
    assert encoder.__module__ == f"{archive.prefix}.json"
    assert type(pickle.loads(pickle.dumps(encoder()))) is encoder


def test_a_folder_without_init_is_a_package(archive: ArchiveModules) -> None:
    inner = importlib.import_module("plain_folder.inner")
    assert inner is archive.load("plain_folder.inner")
    assert pickle.loads(pickle.dumps(inner.square)) is inner.square


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_the_archives_folder_on_the_path_makes_no_second_module(archive: ArchiveModules, place: int) -> None:
    sys.path.insert(place, archive.model_dir)
    assert importlib.import_module("plain_net") is archive.load("plain_net")
    assert importlib.import_module("plain_folder.inner") is archive.load("plain_folder.inner")


def test_a_module_that_fails_has_no_name_left(archive: ArchiveModules) -> None:
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("plain_broken")
    assert "plain_broken" not in sys.modules


def test_a_module_that_is_not_there_is_missed_under_its_plain_name(archive: ArchiveModules) -> None:
    assert importlib.util.find_spec("plain_parts.none") is None
    with pytest.raises(ModuleNotFoundError) as missed:
        importlib.import_module("plain_parts.none")
    assert missed.value.name == "plain_parts.none"
    with pytest.raises(ImportError, match="cannot import name 'none' from 'plain_parts'"):
        archive.load("plain_asking")


def test_a_loader_gives_the_source_for_the_name_its_module_has(archive: ArchiveModules) -> None:
    module = archive.load("plain_parts.leaf")
    assert isinstance(module.__loader__, InspectLoader)
    assert module.__loader__.get_source(module.__name__) == _FILES["plain_parts/leaf.py"]
    assert not module.__loader__.is_package(module.__name__)


def test_a_module_may_put_something_else_in_its_place(archive: ArchiveModules) -> None:
    assert vars(archive.load("plain_using"))["green"] == 2
    assert importlib.import_module("plain_other") is archive.load("plain_other")
    assert importlib.import_module("plain_parts.other") is archive.load("plain_parts.other")
    del sys.modules["plain_other"]
    assert importlib.import_module("plain_other") is archive.load("plain_other")


def test_a_reload_that_fails_leaves_the_module_as_it_is(archive: ArchiveModules) -> None:
    module = archive.load("plain_net")
    Path(archive.model_dir, "plain_net.py").write_text("raise ValueError('broken')")
    with pytest.raises(ValueError, match="broken"):
        importlib.reload(module)
    assert sys.modules["plain_net"] is module


def test_what_was_loaded_by_hand_keeps_its_name(archive: ArchiveModules) -> None:
    file = Path(archive.model_dir, "plain_net.py")
    spec = importlib.util.spec_from_file_location("plain_net", file)
    assert spec is not None
    by_hand = sys.modules["plain_net"] = importlib.util.module_from_spec(spec)
    assert importlib.import_module("plain_net") is by_hand
    assert archive.load("plain_net").Net.__module__ == f"{archive.prefix}.plain_net"


def test_spawned_processes_import_the_archives_modules(archive: ArchiveModules) -> None:
    square = archive.load("plain_folder.inner").square
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(square, 3).result() == 9


def test_what_the_process_has_already_comes_first(archive: ArchiveModules) -> None:
    assert importlib.import_module("json") is json
    assert archive.load("json").dumps is None


def test_doing_it_again_changes_nothing(archive: ArchiveModules) -> None:
    before, path = list(sys.meta_path), list(sys.path)
    give_plain_names(archive)
    assert (sys.meta_path, sys.path) == (before, path)
