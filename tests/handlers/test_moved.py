"""Old paths of handlers lead to the modules of today."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from torchere.handlers.moved import NEW_PATHS


@pytest.mark.parametrize("old", NEW_PATHS)
def test_an_old_path_is_the_module_of_today(old: str) -> None:
    code = f"""
import importlib
old = importlib.import_module("torchere.handlers.{old}")
new = importlib.import_module("torchere.handlers.{NEW_PATHS[old]}")
assert old is new, old
assert new.__spec__.name == new.__name__ == "torchere.handlers.{NEW_PATHS[old]}", new.__spec__
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_classes_of_old_paths_can_be_pickled_and_inherited_from() -> None:
    old = importlib.import_module("torchere.handlers.image_classifier")
    from torchere.handlers import ImageClassifier

    assert old.ImageClassifier is ImageClassifier
    assert pickle.loads(pickle.dumps(old.ImageClassifier)) is ImageClassifier


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="never_was"):
        importlib.import_module("torchere.handlers.never_was")
