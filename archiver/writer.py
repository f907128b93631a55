"""Writes archives: reproducible, streamed, all or nothing."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torchere.archiver.errors import PackingError
from torchere.archiver.gather import Input, gather
from torchere.archiver.names import MANIFEST_NAME
from torchere.archiver.progress import Progress
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.sinks import Sink, open_sink
from torchere.archiver.staging import staged

_log = logging.getLogger("torchere.archiver")

# Weights hardly compress, and stored they can be mapped into memory where they lie.
_WEIGHT_SUFFIXES = frozenset({".pt", ".pth", ".pt2", ".onnx", ".so", ".safetensors", ".bin"})
_SAMPLED_FROM_BYTES = 2**18
_SAMPLE_BYTES = 2**16
_WORTH_DEFLATING = 0.9  # compressed / plain; above it the reader's time is worth more than the space


def write_archive(request: ArchiveRequest, progress: Progress | None = None) -> Path:
    """Write the archive that `request` describes and return its path.

    Files are read in chunks, never whole. The same files give the same bytes: entries are sorted, the
    manifest comes last, times and modes are constants. A failed call leaves nothing behind; in a folder that
    was there (`no-archive` with `force`) some files may be new by then.

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
        _refuse_existing(request)  # once more: another run may have been quicker
    return target


@contextmanager
def _saying_what_does_not_fit(target: Path) -> Iterator[None]:
    """A write that fails names no file, and the disk of the archive is not the only one in use."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(target)
        raise


def check_target(request: ArchiveRequest) -> None:
    """See whether the archive may be written where it belongs; changes nothing.

    `write_archive` does this, too. For those who have long to do before they come to that.

    Raises:
        PackingError: something is there already, or the place is no directory.
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
    """Say whether compressing is wasted: weights by their suffix, large files by three samples."""
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
        """Up to `size` bytes; b"" once all were given."""
        chunk = self._file.read(self._left_bytes if size < 0 else min(size, self._left_bytes))
        self._left_bytes -= len(chunk)
        self._hash.update(chunk)
        self._progress.advance(len(chunk))
        return chunk

    def digest(self, path: Path) -> str:
        """`sha256:` and the hex digits, once everything was read."""
        if self._left_bytes or self._file.read(1):
            raise PackingError(f"{path} changed while it was packed; try again when nobody writes to it")
        return f"sha256:{self._hash.hexdigest()}"
