"""Old paths of handlers lead to the modules of today."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from torchere.handlers.moved import NEW_PATHS

# Each path is imported first by its old name, in a process of its own; forks share the import of torch.
IN_FORKS = """
import importlib, os, sys
import torch
from torchere.handlers.moved import NEW_PATHS

for old, new in NEW_PATHS.items():
    if os.fork():
        _, status = os.wait()
        if status:
            sys.exit(f"torchere.handlers.{old}: see above")
        continue
    module = importlib.import_module(f"torchere.handlers.{old}")
    name = new if new.startswith("torchere.") else f"torchere.handlers.{new}"
    assert module is importlib.import_module(name), old
    assert module.__spec__.name == module.__name__ == name, module.__spec__
    os._exit(0)
print(len(NEW_PATHS))
"""


def test_an_old_path_is_the_module_of_today() -> None:
    done = subprocess.run([sys.executable, "-c", IN_FORKS], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{len(NEW_PATHS)}\n"), done.stderr


def test_classes_of_old_paths_are_those_of_today_and_can_be_pickled() -> None:
    old = importlib.import_module("torchere.handlers.image_classifier")
    from torchere.handlers import ImageClassifier

    assert old.ImageClassifier is ImageClassifier
    assert pickle.loads(pickle.dumps(old.ImageClassifier)) is ImageClassifier


def test_the_names_of_a_backend_have_their_old_path() -> None:
    old = importlib.import_module("torchere.handlers.ts_compat.utilities")
    from torchere.handlers.loading.compile import PT2Backend

    assert old.PT2Backend is PT2Backend
    assert not hasattr(old, "never_was")


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="never_was"):
        importlib.import_module("torchere.handlers.never_was")
