from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchere.handlers.archive_import import ArchiveModules, forget_archive, open_archive
from torchere.handlers.archive_plain_names import give_plain_names

_FILES = {
    "plain_net.py": "from plain_parts import blocks\nclass Net: pass\n",
    "plain_parts/__init__.py": "",
    "plain_parts/blocks.py": "from . import leaf\nclass Block: pass\n",
    "plain_parts/leaf.py": "",
    "json.py": "dumps = None",
}


@pytest.fixture
def archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    before = list(sys.meta_path)
    made = open_archive("plain", "1.0", str(write_archive(_FILES)))
    give_plain_names(made)
    yield made
    sys.meta_path[:] = [item for item in sys.meta_path if item in before]
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
    written = b"cplain_net\nNet\n)\x81."  # what a training script that had `import plain_net` wrote
    assert type(pickle.loads(written)) is archive.load("plain_net").Net


def test_what_the_process_has_already_comes_first(archive: ArchiveModules) -> None:
    assert importlib.import_module("json") is json
    assert archive.load("json").dumps is None


def test_doing_it_again_changes_nothing(archive: ArchiveModules) -> None:
    before = list(sys.meta_path)
    give_plain_names(archive)
    assert sys.meta_path == before
