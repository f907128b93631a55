"""Chooses the class of the model among several of one file, for a server, which takes a file of one only."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_NAMING = '''\
"""Names the model's class among those of {file}; written by torchere archive."""

from importlib import import_module


class {name}(import_module({stem!r}).{name}):
    pass
'''


def outermost(source: bytes, names: Sequence[str]) -> list[str]:
    """Return those of the classes that no other class of the source names: parts are named by the whole."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    named = {
        inner.id
        for one in classes
        for inner in ast.walk(one)
        if isinstance(inner, ast.Name) and inner.id != one.name
    }
    return [name for name in names if name not in named]


def import_name(model_file: Path) -> str:
    """Return the name under which the file is imported, in `sys.modules`."""
    return f"_torchere_model_{model_file.stem}"


def modules_in(model_file: Path) -> list[type[torch.nn.Module]]:
    """Return the `torch.nn.Module`s that the file, which was imported, itself defines, each once."""
    loaded = import_name(model_file)
    found = [
        item
        for item in vars(sys.modules[loaded]).values()
        if isinstance(item, type) and issubclass(item, torch.nn.Module) and item.__module__ == loaded
    ]
    return list(dict.fromkeys(found))  # one may have several names


def file_to_serve(model_file: Path, module: torch.nn.Module, work: Path, beside: Path) -> Path:
    """Return a Python file that defines the module's class and no other `torch.nn.Module`, for a server.

    Args:
        model_file: the file that the class comes from; it is returned if it has one such class.
        module: the model, an instance of a class of that file.
        work: an empty folder for the file that is written otherwise.
        beside: where `model_file` is copied then: the file that is written imports it.
    """
    defined = modules_in(model_file)
    chosen = next((kind for kind in type(module).__mro__ if kind in defined), None)
    if len(defined) == 1 or chosen is None:
        return model_file
    name = f"served_{model_file.stem}.py"
    while (model_file.parent / name).exists():
        name = f"_{name}"
    shutil.copyfile(model_file, beside / model_file.name)
    text = _NAMING.format(file=model_file.name, stem=model_file.stem, name=chosen.__name__)
    written = work / name
    written.write_text(text, encoding="utf-8")
    return written
