"""Writes archives: reproducible, streamed, all or nothing."""

from __future__ import annotations

import errno
import filecmp
import glob
import hashlib
import io
import logging
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from torchere.archiver.atomic import is_unfinished, staged
from torchere.archiver.container.entries import MANIFEST_NAME, first_clash, problem_with
from torchere.archiver.container.sinks import Sink, open_sink
from torchere.archiver.errors import ModelRefused, PackingError
from torchere.archiver.request import DEFAULT_HANDLER, ArchiveRequest
from torchere.archiver.signature import SIGNATURE_NAME

LARGE_BYTES = 64 * 2**20  # smaller files are packed before a bar could be read
_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """A progress bar for the bytes of the current file; used by one thread.

    Shows progress only if `stream` is a terminal and the file is large.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._clock = clock
        self._name = ""
        self._total_bytes = 0
        self._done_bytes = 0
        self._drawn_s = float("-inf")

    def start(self, name: str, total_bytes: int) -> None:
        """Begin a file of `total_bytes`."""
        self._name, self._total_bytes, self._done_bytes = name, total_bytes, 0

    def advance(self, count: int) -> None:
        """Add `count` finished bytes, and draw the bar when it is due."""
        self._done_bytes += count
        now_s = self._clock()
        if self._stream and self._total_bytes >= LARGE_BYTES and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            filled = _WIDTH * self._done_bytes // self._total_bytes
            percent = 100 * self._done_bytes // self._total_bytes
            self._stream.write(f"\r{self._name} [{'#' * filled:<{_WIDTH}}] {percent:3d}%")
            self._stream.flush()

    def finish(self) -> None:
        """End the file and erase the bar."""
        if self._stream and self._total_bytes >= LARGE_BYTES:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


_LEFT_OUT_DIRECTORIES = frozenset({"__MACOSX", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Input:
    """One file on disk and the name it gets in the archive."""

    name: str
    path: Path


def gather(request: ArchiveRequest) -> list[Input]:
    """List the files of `request`, sorted by entry name; links are followed.

    Files get the names of `ArchiveRequest.name_of`; below a directory in `extra_files` the structure
    is kept, without hidden directories, `__pycache__` and `__MACOSX`. The unfinished output of another run is
    never an input, and neither is an existing output, unless it is itself a given directory.

    Raises:
        FileNotFoundError: A named file does not exist.
        PackingError: Two different files have the same name, or a name or file type can't be packed.
        ModelRefused: The handler needs a file that is not among them.
    """
    chosen: dict[str, Input] = {}
    made = list(_below(Path(request.made), request)) if request.made else []
    left_out = {item.name for item in made}
    extra = (item for item in extra_files(request) if item.name not in left_out)
    for item in (*_named_files(request), *made, *extra):
        if _is_output(item.path, request.target):
            continue
        if item.name == MANIFEST_NAME:
            _log.warning("Leaving out %s: the archiver writes a manifest of its own", item.path)
            continue
        _check(item, request)
        _check_agreement(chosen.setdefault(item.name, item), item)
    if clash := first_clash(sorted(chosen)):
        raise PackingError(
            f"{chosen[clash[0]].path} and {chosen[clash[1]].path} would be one file on some systems; "
            "rename one"
        )
    if request.handler == DEFAULT_HANDLER and SIGNATURE_NAME not in chosen:
        raise ModelRefused(
            f"the handler {DEFAULT_HANDLER!r}, the default, needs {SIGNATURE_NAME}: give --example with "
            f"inputs (.json, .pt, .npy or a picture), or {SIGNATURE_NAME} among the extra files, or name "
            "another handler"
        )
    return [chosen[name] for name in sorted(chosen)]


def _named_files(request: ArchiveRequest) -> Iterator[Input]:
    files = (
        request.model_file,
        request.serialized_file,
        request.handler_file(),
        request.requirements_file,
        request.config_file,
    )
    for path in [Path(file) for file in files if file]:
        os.stat(path)  # raises a FileNotFoundError that names the file
        yield _flat(path, request)


def _flat(path: Path, request: ArchiveRequest) -> Input:
    return Input(request.name_of(path) or path.name, path)


def extra_files(request: ArchiveRequest) -> Iterator[Input]:
    """Yield the extra files under their names in the archive; raise FileNotFoundError if one is missing."""
    for given in request.extra_files:
        pattern = str(given).strip()
        if os.path.exists(pattern):
            yield from _below(Path(pattern), request)
        elif glob.has_magic(pattern):
            matches = sorted(glob.glob(pattern))
            if not matches:
                _log.warning("Given wildcard pattern did not match any file: %s", pattern)
            for match in matches:
                yield from _below(Path(match), request)
        else:
            raise FileNotFoundError(f"File does not exist: {given}")


def _below(path: Path, request: ArchiveRequest) -> Iterator[Input]:
    """Yield the file itself, or each file in the directory, under its path relative to the directory."""
    if not path.is_dir():
        yield _flat(path, request)
        return
    # Each folder with the identities of its parent folders, so that a link to one of them ends the walk.
    folders: list[tuple[Path, frozenset[tuple[int, int]]]] = [(path, frozenset())]
    while folders:
        folder, above = folders.pop()
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            continue
        for file in folder.iterdir():
            if not file.is_dir():
                yield Input(file.relative_to(path).as_posix(), file)
            elif _is_wanted(file.name) and not _is_output(file, request.target):
                folders.append((file, above | {here}))


def _is_wanted(directory: str) -> bool:
    return directory not in _LEFT_OUT_DIRECTORIES and not directory.startswith(".")


def _is_output(path: Path, target: Path) -> bool:
    return is_unfinished(path.name) or (target.exists() and path.exists() and os.path.samefile(path, target))


def _check(item: Input, request: ArchiveRequest) -> None:
    if problem := problem_with(item.name):
        raise PackingError(f"{item.path} can't be packed: {problem}; rename it")
    if item.path.is_symlink() and not item.path.exists():
        raise PackingError(
            f"{item.path} is a link to {os.readlink(item.path)}, which does not exist; remove it"
        )
    if not stat.S_ISREG(os.stat(item.path).st_mode):
        if item.path.is_dir():
            if not request.serialized_file or item.path != Path(request.serialized_file):
                raise PackingError(f"{item.path} is a folder; expected a file, such as one in it")
            raise PackingError(
                f"{item.path} is a folder, which no server loads by itself; expected --format torchscript, "
                "export or aoti for a Hugging Face folder or a distributed checkpoint"
            )
        raise PackingError(f"{item.path} is not a regular file; leave it out")


def _check_agreement(first: Input, second: Input) -> None:
    if first is not second and not filecmp.cmp(first.path, second.path, shallow=False):
        raise PackingError(
            f"{first.path} and {second.path} differ, and both would be {first.name!r} in the archive; "
            "rename one"
        )


_log = logging.getLogger("torchere.archiver")

# Weights hardly compress; stored, they can be mapped into memory from the archive.
_WEIGHT_SUFFIXES = frozenset({".pt", ".pth", ".pt2", ".onnx", ".so", ".safetensors", ".bin"})
_SAMPLED_FROM_BYTES = 2**18
_SAMPLE_BYTES = 2**16
_WORTH_DEFLATING = 0.9  # compressed / plain; above this ratio, the reader's time is worth more than the space


def write_archive(request: ArchiveRequest, progress: Progress | None = None) -> Path:
    """Write the archive that `request` describes and return its path.

    Files are read in chunks, never whole. The same files give the same bytes: entries are sorted, the
    manifest comes last, times and modes are constants. A failed call leaves nothing behind, except in a
    folder that existed before (`no-archive` with `force`): some of its files may be new.

    Raises:
        PackingError: The request, a name or the output place is wrong; nothing was written.
        OSError: A file can't be read or written (`FileNotFoundError` for a missing input).
    """
    request.check()
    progress = progress or Progress(None)
    target = request.target
    _prepare(request)
    inputs = gather(request)
    with _saying_what_does_not_fit(target), staged(target, merge=True) as work:
        with open_sink(request.archive_format, work, request.model_name) as sink:
            digests = {item.name: _add(sink, item, request, progress) for item in inputs}
            manifest = request.manifest(digests).dump().encode()
            sink.add(
                MANIFEST_NAME, len(manifest), io.BytesIO(manifest), request.archive_format == "zip-store"
            )
        _refuse_existing(request)  # again, because another run may have written it meanwhile
    return target


@contextmanager
def _saying_what_does_not_fit(target: Path) -> Iterator[None]:
    """Add the archive's path to a disk-full error that names no file, because there may be several disks."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(target)
        raise


def check_target(request: ArchiveRequest) -> None:
    """Check that the archive may be written to its target; change nothing.

    For callers that have long work to do before `write_archive`, which checks it, too.

    Raises:
        PackingError: the target exists already, or its folder is not a directory.
    """
    folder = Path(request.export_path)
    if folder.exists() and not folder.is_dir():
        raise PackingError(
            f"Given export-path {request.export_path} is not a directory. "
            "Point to a valid export-path directory."
        )
    _refuse_existing(request)
    target = request.target
    if target.exists() and target.is_dir() != (request.archive_format == "no-archive"):
        raise PackingError(f"{target} is {'a directory' if target.is_dir() else 'a file'}; move it away")


def _prepare(request: ArchiveRequest) -> None:
    check_target(request)
    if request.target.exists():
        _log.warning("Overwriting %s ...", request.target)
    Path(request.export_path).mkdir(parents=True, exist_ok=True)


def _refuse_existing(request: ArchiveRequest) -> None:
    if not request.force and os.path.lexists(request.target):
        raise PackingError(
            f"{request.target} already exists.\n"
            "Please specify --force/-f option to overwrite the model archive output file.\n"
            "See -h/--help for more details."
        )


def _add(sink: Sink, item: Input, request: ArchiveRequest, progress: Progress) -> str:
    """Stream one file into the archive and return its digest."""
    with open(item.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        store = request.archive_format == "zip-store" or _is_better_stored(item.name, file, size)
        source = _HashedSource(file, size, progress)
        progress.start(item.name, size)
        sink.add(item.name, size, source, store)
        progress.finish()
        return source.digest(item.path)


def _is_better_stored(name: str, file: IO[bytes], size: int) -> bool:
    """Return whether to store the file uncompressed: weights by suffix, large files by three samples."""
    if os.path.splitext(name)[1].lower() in _WEIGHT_SUFFIXES:
        return True
    if size < _SAMPLED_FROM_BYTES:
        return False
    plain = packed = 0
    for offset in (0, size // 2, size - _SAMPLE_BYTES):
        file.seek(offset)
        sample = file.read(_SAMPLE_BYTES)
        plain += len(sample)
        packed += len(zlib.compress(sample, 1))
    file.seek(0)
    return packed > plain * _WORTH_DEFLATING


class _HashedSource:
    """Reads exactly `size` bytes of a file and keeps their SHA-256."""

    def __init__(self, file: IO[bytes], size: int, progress: Progress) -> None:
        self._file = file
        self._left_bytes = size
        self._hash = hashlib.sha256()
        self._progress = progress

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; b"" once all were read."""
        chunk = self._file.read(self._left_bytes if size < 0 else min(size, self._left_bytes))
        self._left_bytes -= len(chunk)
        self._hash.update(chunk)
        self._progress.advance(len(chunk))
        return chunk

    def digest(self, path: Path) -> str:
        """Return `sha256:` and the hex digits; raise PackingError unless exactly `size` bytes were read."""
        if self._left_bytes or self._file.read(1):
            raise PackingError(f"{path} changed while it was packed; try again when no process writes to it")
        return f"sha256:{self._hash.hexdigest()}"
