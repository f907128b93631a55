"""Eager modules: made from a class in a Python file, or by a factory in an importable package.

Only the Python code that the user named is run. If a file has several classes, one is chosen. A server
accepts only one class in a file, so the archiver then adds a second file with a subclass of the chosen class.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.checkpoint import HyperParameters
from torchere.archiver.models.steps import not_ending, refusing
from torchere.archiver.request import check_model_name

_MADE = "name a function without arguments that makes the model: --factory package.module:function"
_MOST_NAMES = 20
_IMPORTED = "install what it imports, or set PYTHONPATH to its folder"
_NAMING = '''\
"""Names the model's class among those of {file}; written by torchere archive."""

from importlib import import_module


class {name}(import_module({stem!r}).{name}):
    pass
'''


def module_from_file(path: Path, given: HyperParameters | None = None) -> tuple[torch.nn.Module, str]:
    """Return an instance of the model's class, and a line that tells the user which class it is, or "".

    The class is the only `torch.nn.Module` that the file defines, or the only one that no other class in the
    file refers to. It is called without arguments, or with those of `given` that it has parameters for.

    The file's folder is importable during the call, so that the file can import modules beside it. Classes
    that the file only imports do not count. Not thread-safe.

    Raises:
        ModelRefused: the file has no such class or more than one, or it raises an error.
        OSError: there is no such file.
    """
    os.stat(path)
    with _importable(path.resolve().parent, first=True):
        with _running(f"{path}: importing the model file", _IMPORTED):
            defined = _classes_in(path)
        names = [item.__name__ for item in defined]
        chosen = names if len(names) == 1 else _outermost(path.read_bytes(), names)
        if len(chosen) != 1:
            raise ModelRefused(
                f"{path} defines these torch.nn.Modules: {', '.join(names) or 'none'}; expected one, the "
                f"model, or one that no other class names; {_advice(path, defined)}"
            )
        model = defined[names.index(chosen[0])]
        made: torch.nn.Module = _made(model, f"{path}: making {model.__name__}()", given)
        told = f"the model is {chosen[0]} of {', '.join(names)}: no other class of {path} names it"
        return made, told if len(names) > 1 else ""


def module_from_factory(name: str, given: HyperParameters | None = None) -> torch.nn.Module:
    """Call `module:name`, a class or a function, and return the `torch.nn.Module` that it makes.

    It is called without arguments, or with those of `given` that it has parameters for.

    `module` may be a file in the current folder, unless an installed module has the same name.

    Raises:
        ModelRefused: the name does not exist, or the call raises an error or returns another object.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute.isidentifier():
        module_name, _, attribute = name.rpartition(".")
        is_path = bool(module_name) and attribute.isidentifier() and not colon
        meant = f"; did you mean {module_name}:{attribute}?" if is_path else ""
        raise ModelRefused(f"the factory is {name!r}; expected package.module:function{meant}")
    with _importable(Path.cwd(), first=False):
        with _running(f"importing the factory {name}", _IMPORTED):
            module = _module(module_name)
        factory = getattr(module, attribute, None)
        if not callable(factory):
            raise ModelRefused(f"the factory {name} is {_about(module, attribute)}")
        made = _made(factory, f"calling the factory {name}", given)
    if not isinstance(made, torch.nn.Module):
        raise ModelRefused(f"the factory {name} returned a {type(made).__name__}; expected a torch.nn.Module")
    return made


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # `name` was found; a module that it imports was not
        if name.endswith(".py"):
            module = name.removesuffix(".py")
            raise ModelRefused(
                f"the factory's module is {name!r}; expected {module!r}, without .py"
            ) from error
        file = f"{name.partition('.')[0]}.py"
        raise ModelRefused(
            f"the factory's module {error.name!r} is not there; expected {file} in the current folder, or an "
            "installed package; or set PYTHONPATH to its folder"
        ) from error


def _about(module: ModuleType, attribute: str) -> str:
    """Return the reason why a factory can't be called, and the names that its module defines."""
    found = getattr(module, attribute, None)
    wrong = f"a {type(found).__name__}, which can't be called" if hasattr(module, attribute) else "not there"
    here = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    near = difflib.get_close_matches(attribute, here, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return (
        f"{wrong}; expected a torch.nn.Module's class, or a function that makes one: {module.__name__} "
        f"defines {', '.join(sorted(here)[:_MOST_NAMES]) or 'none'}{meant}"
    )


def _made(maker: Any, doing: str, given: HyperParameters | None) -> Any:
    arguments = _arguments(maker, given) if given else {}
    told = f"with {', '.join(arguments)} of the checkpoint" if arguments else "without arguments"
    with _running(f"{doing} {told}", _MADE):
        return maker(**arguments)


@contextmanager
def _running(doing: str, advice: str) -> Iterator[None]:
    """Run the block, which calls the user's code, as the step `doing` (see `refusing`); refuse `sys.exit`."""
    with not_ending(doing), refusing(doing, advice):
        yield


def _arguments(maker: Any, given: HyperParameters) -> dict[str, Any]:
    """Return the hyperparameters that `maker` takes: by name, or all in one dict for `given.parameter`."""
    parameters = inspect.signature(maker).parameters
    if given.parameter in parameters:
        return {str(given.parameter): dict(given.values)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given.values)
    return {name: value for name, value in given.values.items() if name in parameters}


def _outermost(source: bytes, names: Sequence[str]) -> list[str]:
    """Return the classes that no other class in the source refers to; a model refers to its own parts."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    named = {
        inner.id
        for one in classes
        for inner in ast.walk(one)
        if isinstance(inner, ast.Name) and inner.id != one.name
    }
    return [name for name in names if name not in named]


def _classes_in(path: Path) -> list[type[torch.nn.Module]]:
    name = _import_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelRefused(f"{path} is no Python file; expected one with the model's class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where torch.jit.script looks for the source
    spec.loader.exec_module(module)
    return _modules_in(path)


def _import_name(model_file: Path) -> str:
    """Return the name of the imported file in `sys.modules`."""
    return f"_torchere_model_{model_file.stem}"


def _modules_in(model_file: Path) -> list[type[torch.nn.Module]]:
    """Return the `torch.nn.Module` classes that an imported file defines itself, each once."""
    loaded = _import_name(model_file)
    found = [
        item
        for item in vars(sys.modules[loaded]).values()
        if isinstance(item, type) and issubclass(item, torch.nn.Module) and item.__module__ == loaded
    ]
    return list(dict.fromkeys(found))  # a class may have several names


@contextmanager
def _importable(folder: Path, *, first: bool) -> Iterator[None]:
    """Make modules in the folder importable; with `first`, before installed ones of the same name.

    A console script has none of the user's folders on its path. No bytecode of these modules is written,
    because Python would still use it after the file was changed, within a second, to one of the same length.
    """
    sys.path.insert(0 if first else len(sys.path), str(folder))
    importlib.invalidate_caches()
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept
        with suppress(ValueError):  # the model's own code may have removed it
            sys.path.remove(str(folder))


def _advice(path: Path, defined: Sequence[type]) -> str:
    if not defined:
        return "define it there, or name the function that makes it: --factory package.module:function"
    example = f"--factory {path.stem}:{defined[-1].__name__}"
    return (
        "import its parts from a file beside it, or, for a --format other than keep, leave --model-file out "
        f"and name it in the file's folder: {example}"
    )


@contextmanager
def traceable_lengths(module: torch.nn.Module) -> Iterator[None]:
    """In the block, make `len(tensor)` in the code of the module's classes return `tensor.shape[0]`.

    Python's own `len` returns a plain number, which tracers and torch.export make a constant: a model with
    `token.expand(len(x), -1, -1)` would accept only the batch size of its example. For the same reason
    `int(batch_sizes[0])` in torch's int8 layers for packed sequences stays a tensor. Not thread-safe.
    """
    places = {id(found): found for part in module.modules() for found in _globals_of(type(part))}
    with ExitStack() as undo:
        for place in places.values():
            if "len" not in place:
                place["len"] = _length
                undo.callback(place.pop, "len")
        if _INT8_RECURRENT in sys.modules:  # otherwise the model has no such layer
            for kind in (sys.modules[_INT8_RECURRENT].LSTM, sys.modules[_INT8_RECURRENT].GRU):
                undo.callback(setattr, kind, "forward_packed", kind.forward_packed)
                kind.forward_packed = _keeping_sizes(kind.forward_packed)
        yield


_INT8_RECURRENT = "torch.ao.nn.quantized.dynamic.modules.rnn"


def _keeping_sizes(function: FunctionType) -> FunctionType:
    """Return the function with an `int` of its own, which returns its argument.

    The module's other functions keep `int`: torch's compiler, which the tracer calls, reads it as a type.
    """
    names = {**function.__globals__, "int": lambda value: value}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _globals_of(kind: type) -> Iterator[dict[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            found = getattr(sys.modules.get(base.__module__), "__dict__", None)
            if found is not None:
                yield found


def _length(value: Any) -> Any:
    size: Any = value.shape if isinstance(value, (torch.Tensor, torch.fx.Proxy)) else None
    return len(value) if size is None else size[0]


def take_along(model_file: Path, beside: Path) -> None:
    """Copy the source files that were imported from the model file's folder to `beside`, for the archive.

    Call it after the model file was imported. A module counts if its name is its path in that folder, so
    packages installed below the folder (in a virtual environment) do not. If the model file itself lies among
    installed packages, nothing is copied, because the server has these packages.
    """
    folder = model_file.resolve().parent
    if any(folder == Path(place).resolve() for place in sysconfig.get_paths().values()):
        return
    for name, module in tuple(sys.modules.items()):
        path = Path(*name.split("."))
        for relative in (path.with_suffix(".py"), path / "__init__.py"):
            file = folder / relative
            if getattr(module, "__file__", None) == str(file) and file.is_file():
                target = beside / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def file_to_serve(model_file: Path, module: torch.nn.Module, work: Path, beside: Path) -> Path:
    """Return a Python file that defines the module's class and no other `torch.nn.Module`, for a server.

    Args:
        model_file: the file that the class comes from; it is returned if it has only one such class.
        module: the model, an instance of a class of that file.
        work: an empty folder for the new file, which is written if the file has several classes.
        beside: the folder to which `model_file` is copied in that case, because the new file imports it.

    Raises:
        ModelRefused: a server can't import the file; see `check_model_name`.
    """
    check_model_name(model_file)
    defined = _modules_in(model_file)
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
