"""Eager modules: from a class in a Python file, or from a factory in an importable package.

This runs the Python that the user named, and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.load.checkpoint import HyperParameters
from torchere.archiver.models.steps import refusing


def module_from_file(path: Path, given: HyperParameters | None = None) -> torch.nn.Module:
    """Return an instance of the one `torch.nn.Module` that the file defines.

    It is made without arguments, or with those of `given` that it has parameters for.

    The file's folder is importable meanwhile, so that the file can import its neighbours. Only classes that
    the file itself defines count. Not thread-safe.

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
        made: torch.nn.Module = _made(defined[0], f"{path}: making {defined[0].__name__}()", given)
        return made


def module_from_factory(name: str, given: HyperParameters | None = None) -> torch.nn.Module:
    """Call `module:name`, a class or a function, and return the module that it makes.

    It is called without arguments, or with those of `given` that it has parameters for.

    The module may be a file in the current folder, unless an installed one has the same name.

    Raises:
        ModelRefused: the name does not exist, the call raises, or it returns something else.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute.isidentifier():
        raise ModelRefused(f"the factory is {name!r}; expected package.module:function")
    with _importable(Path.cwd(), first=False):
        with refusing(f"importing the factory {name}"):
            factory = getattr(importlib.import_module(module_name), attribute)
        made = _made(factory, f"calling the factory {name}", given)
    if not isinstance(made, torch.nn.Module):
        raise ModelRefused(f"the factory {name} returned a {type(made).__name__}; expected a torch.nn.Module")
    return made


def _made(maker: Any, doing: str, given: HyperParameters | None) -> Any:
    arguments = _arguments(maker, given) if given else {}
    told = f"with {', '.join(arguments)} of the checkpoint" if arguments else "without arguments"
    with refusing(f"{doing} {told}"):
        return maker(**arguments)


def _arguments(maker: Any, given: HyperParameters) -> dict[str, Any]:
    """Return the hyperparameters that have a parameter; all of them, as one, where one takes them all."""
    parameters = inspect.signature(maker).parameters
    if given.parameter in parameters:
        return {str(given.parameter): dict(given.values)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given.values)
    return {name: value for name, value in given.values.items() if name in parameters}


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
    return list(dict.fromkeys(found))  # each class once, even if it has several names


@contextmanager
def _importable(folder: Path, *, first: bool) -> Iterator[None]:
    """Make modules in the folder importable; with `first`, before installed ones of the same name.

    A console script has no folder of the user's on its path.
    """
    sys.path.insert(0 if first else len(sys.path), str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
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


def neighbours_of(model_file: Path) -> Mapping[PurePosixPath, Path]:
    """Return the source files that were imported from the model file's folder, by relative name.

    Call it after the model file was imported. A module counts when its name is its path in that folder, so
    that packages installed below it (a virtual environment) do not count. A model file that lies among
    installed packages has no neighbours, because those packages are the server's.
    """
    folder = model_file.resolve().parent
    if any(folder == Path(place).resolve() for place in sysconfig.get_paths().values()):
        return {}
    found = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(*name.split("."))
        for relative in (path.with_suffix(".py"), path / "__init__.py"):
            if file == str(folder / relative) and (folder / relative).is_file():
                found[PurePosixPath(relative.as_posix())] = folder / relative
    return found


def take_along(model_file: Path, beside: Path) -> None:
    """Copy the neighbours of the model file to `beside`, under their relative names, for the archive."""
    for relative, file in neighbours_of(model_file).items():
        target = beside / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


# Model folders of Hugging Face: config.json and safetensors, made into a module by transformers.
#
# Nothing is fetched and no Python in the folder is run. transformers is not needed to serve the result.

_LENGTH = 8  # tokens of the example that is made when none is given
_TEXT = "input_ids"


def is_model_folder(path: Path) -> bool:
    """Return whether the folder is a Hugging Face model folder: it has a `config.json`."""
    return (path / "config.json").is_file()


def module_from_folder(path: Path) -> torch.nn.Module:
    """Load a Hugging Face model; it takes its inputs by position and returns a dict of tensors.

    Raises:
        ModelRefused: transformers is not installed, the architecture is unknown or in the folder's own
            Python, or the weights are a pickle, or some are missing.
    """
    architecture = _architecture(path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelRefused(
            f"{path} is a Hugging Face model folder, which needs transformers, and it is not installed; "
            "install torchere[huggingface]"
        )
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(f"{path}: no *.safetensors in it; save the model with safe_serialization=True")
    transformers: Any = importlib.import_module("transformers")
    known = getattr(transformers, architecture, None)
    if not (isinstance(known, type) and issubclass(known, torch.nn.Module)):
        raise ModelRefused(
            f"{path}: this transformers ({transformers.__version__}) has no model {architecture}; "
            "install one that has; Python in the folder is not run"
        )
    model = _loaded(known, path)
    main = str(getattr(model, "main_input_name", _TEXT))
    return _TextModel(model.eval()) if main == _TEXT else _OneInputModel(model.eval(), main)


def _loaded(known: Any, path: Path) -> Any:
    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with refusing(f"{path}: loading {known.__name__}"):
        model, found = known.from_pretrained(str(path), output_loading_info=True, **options)
        missing = sorted(found["missing_keys"])
    if missing:  # transformers makes up random numbers for them
        raise ModelRefused(
            f"{path}: it lacks {len(missing)} of the weights of {known.__name__}, {missing[0]} for one; get "
            "the whole folder, or name in config.json the architecture that its weights are of"
        )
    return model


def example_for(module: torch.nn.Module) -> Tensors | None:
    """Return an example for a text model, or None for a model whose inputs are not known here."""
    if not isinstance(module, _TextModel):
        return None
    ids = torch.arange(2 * _LENGTH).reshape(2, _LENGTH) % 50 + 1
    return ids, torch.ones_like(ids)


def _tensors_of(output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of an output; caches of keys and values are left out."""
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


class _TextModel(torch.nn.Module):
    """Text model that takes token ids and a mask by position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return _tensors_of(self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True))


class _OneInputModel(torch.nn.Module):
    """Model that takes the architecture's main input, pixels or sound, by position."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return _tensors_of(self.model(**{self.name: inputs}, return_dict=True))


def _architecture(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        names = config["architectures"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelRefused(f"{path}/config.json names no architectures ({error!r})") from error
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).isidentifier():
        raise ModelRefused(f"{path}/config.json has the architectures {ascii(names)[:80]}; expected one name")
    return str(names[0])
