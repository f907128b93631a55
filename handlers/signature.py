"""Read `signature.json` of an unpacked archive."""

from __future__ import annotations

import logging
from pathlib import Path

from torchere.archiver.signature import MAX_TEXT_BYTES, SIGNATURE_NAME, Signature, SignatureError, parse

logger = logging.getLogger(__name__)


def read_signature(model_dir: str | Path) -> Signature | None:
    """Return the signature of an archive; None when it has none.

    Raises:
        SignatureError: the file exists and is invalid.
    """
    path = Path(model_dir, SIGNATURE_NAME)
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise SignatureError(
            f"{SIGNATURE_NAME} has {path.stat().st_size} bytes; expected at most {MAX_TEXT_BYTES}"
        )
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as err:
        raise SignatureError(f"{SIGNATURE_NAME} is no UTF-8 text: {err}") from err


def archive_signature(model_dir: str | Path) -> Signature | None:
    """Return the signature like `read_signature`, but None for an invalid file, with a warning.

    An archive may use a file of that name for a purpose of its own.
    """
    try:
        return read_signature(model_dir)
    except SignatureError as err:
        logger.warning("%s is not used: %s", Path(model_dir, SIGNATURE_NAME), err)
        return None
