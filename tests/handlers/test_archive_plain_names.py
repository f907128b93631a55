from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from torchere.handlers.archive_import import ArchiveModules, forget_archive, open_archive
from torchere.handlers.archive_plain_names import give_plain_names

_FILES = {
    "plain_net.py": "from plain_parts import blocks\nclass Net: pass\n",
    "plain_parts/__init__.py": "",
    "plain_parts/blocks.py": "from . import leaf\nclass Block: pass\n",
    "plain_parts/leaf.py": "",
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
