"""`torchere serve MODEL`: packs a model into an archive in the cache, unless the cache has it already.

The model is packed in a child process, so that the server's process imports no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path

from torchere.archiver.cli import run_model_archive, tidy_when_ended
from torchere.archiver.container.entries import MANIFEST_NAME
from torchere.archiver.model_flags import packing_defaults
from torchere.archiver.reader import ArchiveError, open_archive
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.scan.weights import ONNX, classify_file
from torchere.serving import __version__
from torchere.serving.commands.inputs import prepare_for, read_config
from torchere.serving.commands.serve_options import (
    LaunchRefused,
    current_directory,
    refuse_packing_options,
)
from torchere.serving.process.allocator import keep_freed_memory

MAX_CACHE_BYTES = 10 * 2**30
_FILES = ("model_file", "config_file", "requirements_file", "example", "samples")
_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9_\-.]+")
# Other versions of these make other archives; packing tries ONNX batches if onnxruntime is installed.
_MADE_BY = ("torch", "torchao", "transformers", "onnxruntime", "onnxruntime-gpu")
_RUNTIME = "onnxruntime"  # of ONNX
_READ_BYTES = 2**20
_CACHE_ADVICE = "set XDG_CACHE_HOME to a folder that you may write to"


class NotPacked(Exception):
    """The model could not be packed, and the reason is printed; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def serve_model(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set the options of a server start to serve `options.model`, packed first if it is not an archive.

    Raises:
        LaunchRefused: there is no such model, or an option does not go with it, or there is no folder for the
            cache, or the current directory was deleted.
        NotPacked: the model can't be packed.
    """
    model = Path(options.model)
    if options.models or options.model_store:
        raise LaunchRefused(
            f"{model} is served from its own store: leave --models and --model-store out, or pack it into "
            "your store with torchere archive"
        )
    current_directory()
    if not model.exists():
        raise LaunchRefused(f"{model}: no such file or folder; check the path")
    if _is_archive(model):
        refuse_packing_options(options, f"{model} is an archive already", but=("model_name",))
        archive, name = model.absolute(), options.model_name
    else:
        _refuse_onnx_without_runtime(model, options)
        name = options.model_name or _name_of(model)
        archive = _packed(model, name, options, environ)
    options.model_store = str(archive.parent)
    options.models = [f"{name}={archive.name}" if name else archive.name]
    options.no_config_snapshots = True  # the models of a snapshot are those of another store


def _is_archive(path: Path) -> bool:
    if path.is_dir():
        return (path / MANIFEST_NAME).is_file()
    try:
        return path.suffix == ".mar" or open_archive(path).has_manifest
    except ArchiveError:
        return False


def _refuse_onnx_without_runtime(model: Path, options: argparse.Namespace) -> None:
    """Raise LaunchRefused for an ONNX model that could not start here without onnxruntime.

    The user's own handler may run the model with another package, and requirements may install onnxruntime.
    """
    if importlib.util.find_spec(_RUNTIME) is not None or _own_handler(options) or options.requirements_file:
        return
    try:
        is_onnx = model.is_file() and classify_file(model).kind == ONNX
    except (ArchiveError, OSError):  # packing reports it
        return
    if is_onnx:
        raise LaunchRefused(
            f"{model} is ONNX, which needs {_RUNTIME}, and it is not installed; install torchere[onnx]"
        )


def _own_handler(options: argparse.Namespace) -> Path | None:
    """Return the file of the handler; None without a handler, or where it is built in."""
    return ArchiveRequest(model_name="", version="", handler=options.handler).handler_file()


def _name_of(model: Path) -> str:
    """Return the name of the file or folder, reduced to the characters that models' names may have."""
    path = model.resolve()
    name = path.name if path.is_dir() else path.stem
    return _NOT_OF_NAMES.sub("-", name).strip("-_.") or "model"


def _packed(model: Path, name: str, options: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    """Return the archive of the model in the cache; pack the model if the cache has no archive of it."""
    cache = _cache(environ)
    archive = cache / _key(model, name, options) / f"{name}.mar"
    if archive.is_file() and _is_current(archive, options):
        print(f"{model}: packed before: {archive}", file=sys.stderr)
    else:
        _make(archive.parent)
        _pack(model, name, archive.parent, options)
    with suppress(OSError):  # a cache that this user may only read can be used, too
        os.utime(archive)  # the time of its last use
        _prune(cache, archive)
    return archive


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of the cache, which belongs to this user alone; make it if it is missing."""
    home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "torchere" / "archives"
    except RuntimeError as error:  # a user without an entry, as in containers that run under any user id
        raise LaunchRefused(
            f"this user has no home directory, which is to hold packed models: {_CACHE_ADVICE}"
        ) from error
    _make(folder)
    if folder.stat().st_uid != os.geteuid():
        raise LaunchRefused(f"{folder} belongs to another user; set XDG_CACHE_HOME to a folder of yours")
    return folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchRefused(
            f"{folder} can't be made: {error.strerror}; it is to hold packed models: {_CACHE_ADVICE}"
        ) from error


def _key(model: Path, name: str, options: argparse.Namespace) -> str:
    """Return the digest of all that the archive is made from: files, options, versions and machine."""
    given = {dest: getattr(options, dest) for dest in packing_defaults()}
    versions = {package: _version_of(package) for package in _MADE_BY}
    about = [__version__, versions, platform.machine(), platform.processor(), model.name, name, given]
    found = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for path in (model, *_files_of(options)):
        for file in sorted(each for each in (path, *path.rglob("*")) if each.is_file()):
            found.update(
                f"\0{file.relative_to(path)}\0{file.stat().st_size}\0".encode(errors="surrogateescape")
            )
            with open(file, "rb") as opened:
                while chunk := opened.read(_READ_BYTES):
                    found.update(chunk)
    return found.hexdigest()[:32]


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _files_of(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the files and folders that the options name; packing reports those that do not exist."""
    yield from (Path(value) for name in _FILES if (value := getattr(options, name)))
    for pattern in (options.extra_files or "").split(","):
        yield from map(Path, sorted(glob(pattern.strip())))
    if (file := _own_handler(options)) is not None:
        yield file


def _is_current(archive: Path, options: argparse.Namespace) -> bool:
    """Return whether the archive holds the Python files as they are now: the key does not cover them.

    Those of a factory or a pickle can be anywhere, so such models are packed anew at each start.
    """
    if options.factory or options.allow_pickle:
        return False
    if not options.model_file:
        return True
    beside = Path(options.model_file).absolute().parent
    opened = open_archive(archive)
    names = [entry.name for entry in opened.entries if entry.name.endswith(".py")]
    return all(
        opened.read_text(name) == (beside / name).read_text(encoding="utf-8", errors="replace")
        for name in names
        if (beside / name).is_file()
    )


def _pack(model: Path, name: str, folder: Path, options: argparse.Namespace) -> None:
    request = argparse.Namespace(
        **{dest: getattr(options, dest) for dest in packing_defaults() if dest != "model_name"},
        model_name=name,
        serialized_file=str(model),
        runtime="python",
        export_path=str(folder),
        archive_format="default",
        force=True,  # replace an outdated archive, or that of a server that packs the same model now
    )
    child = multiprocessing.get_context("fork").Process(target=_pack_and_exit, args=(request,))
    with tidy_when_ended():
        child.start()
        try:
            child.join()
        finally:
            child.terminate()
            child.join()
            with suppress(OSError):
                folder.rmdir()  # only if there is no archive in it
    if child.exitcode:
        status = child.exitcode if child.exitcode > 0 else 128 - child.exitcode
        raise NotPacked(status)


def _pack_and_exit(request: argparse.Namespace) -> None:
    keep_freed_memory(os.environ)  # so that measurements are as in the server
    sys.exit(run_model_archive(request, prepare_for, "torchere serve", read_config))


def _prune(cache: Path, used: Path) -> None:
    """Delete the least recently used archives, until the cache is within its limit."""
    found = [(file.stat().st_mtime, file.stat().st_size, file) for file in cache.glob("*/*.mar")]
    excess = sum(size for _, size, _ in found) - MAX_CACHE_BYTES
    for _, size, file in sorted(found):
        if excess > 0 and file != used:
            file.unlink(missing_ok=True)
            excess -= size
            if not any(file.parent.iterdir()):
                file.parent.rmdir()
