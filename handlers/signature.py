"""Reading `signature.json` of an unpacked archive."""

from __future__ import annotations

import logging
from pathlib import Path

from torchere.archiver.signature import MAX_TEXT_BYTES, SIGNATURE_NAME, Signature, SignatureError, parse

logger = logging.getLogger(__name__)


def read_signature(model_dir: str | Path) -> Signature | None:
    """The signature of an archive; None when it has none.

    Raises:
        SignatureError: the file is there and wrong.
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
    """As `read_signature`, for archives that may have a file of that name for a purpose of their own."""
    try:
        return read_signature(model_dir)
    except SignatureError as err:
        logger.warning("%s is not used: %s", Path(model_dir, SIGNATURE_NAME), err)
        return None
