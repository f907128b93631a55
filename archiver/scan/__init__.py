"""Detection of the kinds of model files, and of code that loading them would run."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from torchere.archiver.container.zip import DAMAGED, check_zip
from torchere.archiver.errors import ArchiveError


class UnsafeModel(ValueError):
    """Loading the model would run code or use files, or the file is damaged; its text says where and why."""


@contextmanager
def checked_zip(file: BinaryIO, size: int) -> Iterator[zipfile.ZipFile]:
    """Open the zip of a model after checking that torch's reader and Python's see the same records in it.

    Raises:
        UnsafeModel: opening the file, or reading it in the block, shows that it is damaged.
    """
    try:
        check_zip(file, size)
        with zipfile.ZipFile(file) as archive:
            yield archive
    except ArchiveError as error:
        raise UnsafeModel(f"the file is damaged: {error.reason}") from error
    except (*DAMAGED, UnicodeDecodeError) as error:
        raise UnsafeModel(f"the file is damaged: {error}") from error
