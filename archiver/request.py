"""The request to pack an archive, and all decisions about it that are made without opening a file."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any, Literal, get_args

from torchere.archiver.errors import ModelRefused, PackingError
from torchere.archiver.manifest import (
    DEFAULT_VERSION,
    EPOCH_S,
    FORMAT_VERSION,
    RUNTIMES,
    Manifest,
    created_on,
)
from torchere.archiver.split import Split

KEEP, TORCHSCRIPT, EXPORT, AOTI = "keep", "torchscript", "export", "aoti"
MODEL_FORMATS = (KEEP, TORCHSCRIPT, EXPORT, AOTI)
ISAS = ("avx2", "avx512")
BUILD_NAME = "MAR-INF/build.json"
FALLBACK_NAME = "model.exported.pt2"  # beside a model compiled for one instruction set
DEFAULT_HANDLER = "tensor"
MAX_SAMPLES = 100
# Turns the body of a request into the model's input tensors, in order, as the archive's handler does; returns
# None if the handler prepares nothing. Raises ValueError.
Prepare = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """A model and the conversion to apply to it; see `torchere archive --help` for each option.

    `model_format` None keeps the format, except that a model becomes TorchScript if it is quantised, or if no
    server loads it unchanged: a Hugging Face folder, a pickled module, a class made by `factory`.
    """

    serialized_file: Path | None = None
    model_file: Path | None = None
    factory: str | None = None
    model_format: str | None = None
    script: bool = False  # compile the source for TorchScript instead of tracing a run
    trace: bool = False  # do not compile the source if tracing fails
    example: Path | None = None
    example_signature: Path | None = None  # a signature.json to make an example from, if no example is given
    dynamic_batch: str | None = None  # "1:64"
    dynamic_sizes: tuple[str, ...] = ()  # "ids,mask:1=2:512"
    isa: str | None = None  # None: the instruction set of this machine
    allow_pickle: bool = False
    strict: bool = True  # False: weights may be unused or missing
    quantize: str | None = None
    samples: Path | None = None
    max_samples: int = MAX_SAMPLES  # limit on the files of a folder; the rest is not read
    prepare: Prepare | None = None  # how the handler prepares bodies, for the example and the samples
    verify: bool = True
    max_drift: float | None = None  # None: the limit for the kind of conversion
    accept_drift: bool = False  # pack the model even if the verification refuses it
    accept_slower: bool = False  # pack a quantised model that is not faster than fp32
    config_file: Path | None = None
    parallel: Split | None = None  # the ranks to serve the model with; packing tries them


@dataclass(frozen=True, slots=True)
class Built:
    """The files to pack. All paths exist; generated files are in the caller's work folder."""

    serialized_file: Path | None
    model_file: Path | None
    config_file: Path | None
    beside: Path  # a folder whose contents go into the archive under their relative names
    extra_files: tuple[Path, ...] = ()


ArchiveFormat = Literal["default", "zip-store", "tgz", "no-archive"]
FORMATS: tuple[str, ...] = get_args(ArchiveFormat)

BUILT_IN_HANDLERS = (
    "base_handler",
    "densenet_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "sequence_classifier",
    "tensor",  # any model with a signature.json
    "text_classifier",
    "text_embedding",
    "voice_activity",
)
"""Handlers that need no file, because torchere's server has them."""

# Built into TorchServe 0.12's server: its archiver accepts them without a file, and so does this one.
_BUILT_IN_PYTHON = frozenset({*BUILT_IN_HANDLERS, "dali_image_classifier", "vllm_handler", "trt_llm_handler"})
_BUILT_IN_CPP = frozenset({"BaseHandler", "TorchScriptHandler"})
_SUFFIXES = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
MODEL_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRequest:
    """One archive to write; see `write_archive`.

    `handler` is a built-in name, or a Python file with or without `.py` and `:function`; "" leaves it to the
    server's `default_service_handler`. Each of `extra_files` is a file, a directory (its contents go to the
    archive's root) or a glob pattern.
    `unpacked` is the folder of an unpacked archive: files in it keep their place. `made` is a folder whose
    files are packed under their relative names; each replaces an extra file of that name.
    `epoch_s` (seconds since 1970, UTC) becomes `createdOn`; the same request with the same files always gives
    the same bytes, on the same release of Python and zlib. `output`, a path in `export_path`, is for an
    archive that is not named after its model. `manifest_members` are written into the manifest beside those
    that are made from the other fields.
    """

    model_name: str
    version: str
    handler: str
    serialized_file: str | Path | None = None
    model_file: str | Path | None = None
    extra_files: tuple[str | Path, ...] = ()
    unpacked: Path | None = None
    made: str | Path | None = None
    requirements_file: str | Path | None = None
    config_file: str | Path | None = None
    runtime: str = "python"
    export_path: str | Path = "."
    output: str | Path | None = None
    archive_format: ArchiveFormat = "default"
    force: bool = False
    epoch_s: int = EPOCH_S
    manifest_members: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Path:
        """Path of the archive: `output`, or `<export_path>/<model_name>` with its format's suffix."""
        if self.output is not None:
            return Path(self.output)
        return Path(self.export_path) / f"{self.model_name}{_SUFFIXES[self.archive_format]}"

    def check(self) -> None:
        """Raise PackingError when a field has a value that no archive can have."""
        if not MODEL_NAME_PATTERN.fullmatch(self.model_name):
            raise PackingError(
                "Model name contains special characters.\nThe allowed regular expression filter for model "
                f"name is: ^{MODEL_NAME_PATTERN.pattern}$"
            )
        if self.archive_format not in FORMATS:
            raise PackingError(f"archive format is {self.archive_format!r}; use one of {', '.join(FORMATS)}")
        if self.runtime not in RUNTIMES:
            raise PackingError(f"runtime is {self.runtime!r}; use one of {', '.join(RUNTIMES)}")
        if self.output is None:
            refuse_two_dots(self.target.name)

    def handler_file(self) -> Path | None:
        """Return the file that `handler` names; None if it is built in or for the server to choose."""
        if self.handler in (_BUILT_IN_CPP if self.runtime == "LSP" else _BUILT_IN_PYTHON) or not self.handler:
            return None
        suffix = _cpp_suffix() if self.runtime == "LSP" else ".py"
        path = Path(self.handler)
        name = path.name.partition(":")[0]  # as the server reads it; a colon in the folder belongs to a drive
        return path.parent / (name if name.endswith(suffix) else f"{name}{suffix}")

    def name_of(self, file: str | Path | None) -> str | None:
        """Return the name that a file, or a handler, has in the archive."""
        if not file:
            return None
        path = Path(file)
        if self.unpacked is not None and path.is_relative_to(self.unpacked):
            return path.relative_to(self.unpacked).as_posix()
        return path.name

    def manifest(self, digests: Mapping[str, str]) -> Manifest:
        """Return the manifest of the archive whose files have these digests.

        A folder records no digests, because users move weights into it and edit its files later.
        """
        return Manifest(
            model_name=self.model_name,
            model_version=self.version or DEFAULT_VERSION,
            serialized_file=self.name_of(self.serialized_file),
            handler=self.name_of(self.handler),
            model_file=self.name_of(self.model_file),
            requirements_file=self.name_of(self.requirements_file),
            config_file=self.name_of(self.config_file),
            runtime=self.runtime,
            created_on=created_on(self.epoch_s),
            archiver_version=FORMAT_VERSION,
            digests=None if self.archive_format == "no-archive" else digests,
            unknown=self.manifest_members,
        )


def refuse_two_dots(archive: str) -> None:
    """Raise PackingError for a file's name with `..`, which servers take for a relative path in a URL."""
    if ".." in archive:
        raise PackingError(
            f"{archive}: no server loads an archive with two dots side by side in its name; expected a name "
            "without these, and without a dot at its end"
        )


def handler_files(handler: str | None, runtime: str | None) -> tuple[str, ...]:
    """Return the files in an archive that its handler may name: the name as written, and with the suffix."""
    path = (handler or "").partition(":")[0]
    return (path, path + (_cpp_suffix() if runtime == "LSP" else ".py")) if path else ()


def _cpp_suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"


# Checks that the named files exist, before anything is read or built; the error is one line.
#
# `write_archive` raises errors for them later, too, with the texts of TorchServe's archiver.


def check_inputs(request: ArchiveRequest) -> None:
    """Check that every file that `request` names exists; matches of a glob pattern are not checked.

    Raises:
        PackingError: a file does not exist; the text names its flag, the expected value and the remedy.
    """
    handler = request.handler_file()
    if handler is not None and _is_missing(handler):
        raise PackingError(f"--handler {request.handler}: {_about_handler(request, handler)}")
    files = {
        "--serialized-file": request.serialized_file,
        "--model-file": request.model_file,
        "--requirements-file": request.requirements_file,
        "--config-file": request.config_file,
    }
    for flag, path in ((flag, Path(file)) for flag, file in files.items() if file):
        if _is_missing(path):
            raise PackingError(f"{flag} {path}: no such file{_place(path)}; check the path")
    check_python(request)
    for given in request.extra_files:
        path = Path(str(given).strip())
        if _is_missing(path) and not has_magic(str(path)):
            raise PackingError(
                f"--extra-files {path}: no such file or folder{_place(path)}; check the path (a comma begins "
                "the next one)"
            )


def check_python(request: ArchiveRequest) -> None:
    """Check that the handler and the model file, if they exist, are valid Python; do not run their code.

    Raises:
        PackingError: the text names the flag, the file, the line and the reason.
    """
    handler = None if request.runtime == "LSP" else request.handler_file()
    for flag, file in (("--handler", handler), ("--model-file", request.model_file)):
        if file is not None and Path(file).is_file():
            _check_syntax(flag, Path(file))


def _check_syntax(flag: str, file: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes, with which the file works
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        version = ".".join(map(str, sys.version_info[:2]))
        raise PackingError(
            f"{flag} {file}{line}: not valid Python {version}: {reason}; correct the file"
        ) from error


def check_model_name(model_file: Path) -> None:
    """Check that a server can import the model file, which it does by the file's name.

    Raises:
        ModelRefused: the name has a dot before its suffix, so an import takes its first part for a package.
    """
    if "." in model_file.stem:
        named = f"{model_file.stem.replace('.', '_')}{model_file.suffix}"
        raise ModelRefused(
            f"--model-file {model_file}: a server imports it by its name, in which a point separates a "
            f"package from its module; rename it, to {named} for example"
        )


def check_examples(options: BuildOptions) -> None:
    """Check that the files of the example and the samples exist.

    Raises:
        PackingError: as `check_inputs`.
    """
    for flag, path in (("--example", options.example), ("--samples", options.samples)):
        if path is not None and _is_missing(path):
            raise PackingError(f"{flag} {path}: no such file or folder{_place(path)}; check the path")


def _about_handler(request: ArchiveRequest, file: Path) -> str:
    found = f"there is no file {file}{_place(file)}"
    if request.runtime == "LSP":
        return f"{found}; give the path of a shared library"
    return (
        f"{found}, and no built-in handler of that name; expected one of {', '.join(BUILT_IN_HANDLERS)}, or "
        "a Python file: check the spelling or the path"
    )


def _is_missing(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # it may exist; reading it will raise the exact error
    return False


def _place(path: Path) -> str:
    return "" if path.is_absolute() else f" in {Path.cwd()}"
