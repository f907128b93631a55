"""Which entry names may stand in an archive. Pure functions, used when packing and when reading.

An entry name is a relative POSIX path. The same rules hold for both directions, so that nothing can be
packed that could not be read back.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MANIFEST_NAME = "MAR-INF/MANIFEST.json"
MAX_NAME_BYTES = 1024  # of the whole name in UTF-8; Linux's PATH_MAX of 4096 must also hold the target folder
MAX_PART_BYTES = 255  # NAME_MAX of the usual file systems

_DRIVE = re.compile(r"^[A-Za-z]:")


def problem_with(name: str) -> str | None:
    """Say why `name` (of a directory: without its last slash) is refused, or None if it is fine."""
    if not name:
        return "the name is empty"
    if "\\" in name:
        return "the name has a backslash"
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        return "the name has a NUL, control or surrogate character"
    if name.startswith("/") or _DRIVE.match(name):
        return "the name is an absolute path"
    return _problem_with_parts(name)


def _problem_with_parts(name: str) -> str | None:
    parts = name.split("/")
    if ".." in parts:
        return "the name leaves the archive by '..'"
    if "" in parts or "." in parts:
        return "the name has an empty or '.' part"
    if any(part[-1] in ". " for part in parts):
        return "a part of the name ends in a dot or a space, which some systems drop"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"the name is longer than {MAX_NAME_BYTES} bytes, or a part of it than {MAX_PART_BYTES}"
    return None


def folded(name: str) -> str:
    """The form in which two names are one file on some file system: without case, in one normal form."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def first_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two file names that can't both be unpacked: equal when folded, or one a folder of the other."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(folded(name), name)) is not name:
            return other, name
    for key, name in seen.items():
        parts = key.split("/")
        for depth in range(1, len(parts)):
            if (other := seen.get("/".join(parts[:depth]), "")) != "":
                return other, name
    return None
