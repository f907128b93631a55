"""Eager modules: from a class in a Python file, or from a factory in an importable package.

This runs the Python that the user named, and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.state_dicts import Weights
from torchere.archiver.models.state_fitting import fitted
from torchere.archiver.models.steps import refusing


def module_from_file(path: Path) -> torch.nn.Module:
    """An instance of the one `torch.nn.Module` that the file defines, made without arguments.

    The file's folder is importable while that happens, so that it finds its neighbours. Other classes in it
    don't count. Not for several threads.

    Raises:
        ModelRefused: it defines none or several, or raises.
        OSError: there is no such file.
    """
    os.stat(path)
    with _importable(path.resolve().parent, first=True):
        with refusing(f"{path}: importing the model file"):
            defined = _classes_in(path)
        if len(defined) != 1:
            names = ", ".join(item.__name__ for item in defined) or "none"
            raise ModelRefused(
                f"{path} defines these torch.nn.Modules: {names}; expected one, the model; "
                f"{_advice(path, defined)}"
            )
        with refusing(f"{path}: making {defined[0].__name__}() without arguments"):
            return defined[0]()


def module_from_factory(name: str) -> torch.nn.Module:
    """What `module:name` returns when it is called: a class of modules, or a function that makes one.

    The module may be a file in the current folder, unless an installed one has the same name.

    Raises:
        ModelRefused: there is no such thing, it raises, or it returns something else.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute.isidentifier():
        raise ModelRefused(f"the factory is {name!r}; expected package.module:function")
    with _importable(Path.cwd(), first=False):
        with refusing(f"importing the factory {name}"):
            factory = getattr(importlib.import_module(module_name), attribute)
        with refusing(f"calling the factory {name} without arguments"):
            made = factory()
    if not isinstance(made, torch.nn.Module):
        raise ModelRefused(f"the factory {name} returned a {type(made).__name__}; expected a torch.nn.Module")
    return made


def load_into(module: torch.nn.Module, weights: Weights, source: Path) -> None:
    """Fill the module with the weights.

    Raises:
        ModelRefused: names or shapes are not the module's.
    """
    state = fitted(weights.tensors, module.state_dict(), source)
    with refusing(f"{source}: loading the weights into {type(module).__name__}"):
        module.load_state_dict(state, assign=False)


def _classes_in(path: Path) -> list[type[torch.nn.Module]]:
    name = f"_torchere_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelRefused(f"{path} is no Python file; expected one with the model's class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where torch.jit.script looks for the source
    spec.loader.exec_module(module)
    found = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, torch.nn.Module) and item.__module__ == name
    ]
    return list(dict.fromkeys(found))  # once, whatever other names it has


@contextmanager
def _importable(folder: Path, *, first: bool) -> Iterator[None]:
    """While entered, modules in the folder can be imported; `first`: before installed ones of the same name.

    A console script has no folder of the user's on its path.
    """
    sys.path.insert(0 if first else len(sys.path), str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # whatever the model's own code did to the path
            sys.path.remove(str(folder))


def _advice(path: Path, defined: Sequence[type]) -> str:
    if not defined:
        return "define it there, or name what makes it: --factory package.module:function"
    example = f"--factory {path.stem}:{defined[-1].__name__}"
    return (
        "import its parts from a file beside it, or, for a --format other than keep, leave --model-file out "
        f"and name it in the file's folder: {example}"
    )
