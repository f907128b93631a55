"""Parser for Java properties files: returns entries with line numbers; does not interpret the keys.

The grammar is that of `java.util.Properties`, with two differences: the file is UTF-8, and errors that Java
ignores (a line without a key, an unpaired surrogate) are reported with a line number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_BYTES = 64 * 2**20  # more than a snapshot of 100,000 versions, which a start must read again

_LINE_END = re.compile(r"\r\n|\n|\r")  # Java has only these three line ends; splitlines() has more
_BLANKS = " \t\f"
_KEY = re.compile(r"(?:[^\\=: \t\f]|\\.)*", re.DOTALL)
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_PLACEHOLDER = re.compile(r"\$\$(\w|[^$]{2,})\$\$", re.ASCII)  # a name may contain any character but $


class ConfigurationError(Exception):
    """The configuration is unusable; the message has the place, the found value and the expected value."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key=value` of a file, unescaped; `line` is the 1-based number of its first line."""

    key: str
    value: str
    line: int


def read_properties(path: Path) -> tuple[Entry, ...]:
    """Return the entries of the file in order, including duplicates, of which the last one counts.

    Raises:
        ConfigurationError: the file is unreadable, larger than `MAX_FILE_BYTES`, not UTF-8 or malformed.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as err:
        raise ConfigurationError(f"{path}: can't be read: {err.strerror}") from err
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: over {MAX_FILE_BYTES} bytes; expected a properties file")
    try:
        return parse_properties(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        raise ConfigurationError(
            f"{path}: line {line}: byte 0x{raw[err.start]:02x} is not UTF-8; "
            r"save the file as UTF-8, or write the character as \uXXXX"
        ) from err
    except ConfigurationError as err:
        raise ConfigurationError(f"{path}: {err}") from err


def parse_properties(text: str) -> tuple[Entry, ...]:
    r"""Return the entries of the text of a properties file.

    >>> parse_properties("a = 1, \\\n    2")
    (Entry(key='a', value='1, 2', line=1),)

    Raises:
        ConfigurationError: a line has no key, a malformed escape or a NUL character.
    """
    return tuple(_entry(line, joined) for line, joined in _logical_lines(text) if joined)


def substitute(entry: Entry, environ: Mapping[str, str]) -> str:
    """Return the value of an entry with each `$$NAME$$` in it replaced by that environment variable.

    Raises:
        ConfigurationError: an environment variable is not set.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in environ:
            # The message begins with TorchServe's words.
            raise ConfigurationError(
                f"Invalid Environment Variable {name}: {entry.key} needs it for $${name}$$, and it is not set"
            )
        return environ[name]

    return _PLACEHOLDER.sub(value_of, entry.value)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, text) of each logical line; skip comments and blank lines.

    Continuation lines are joined.
    """
    parts: list[str] = []
    first = 0  # number of the line that begins the logical line; 0: no logical line has begun
    for number, natural in enumerate(_LINE_END.split(text), start=1):
        line = natural.lstrip(_BLANKS)
        if not any(parts):  # also true after a line that consists of a continuation backslash only
            if not line or line[0] in "#!":
                continue
            first = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:  # an odd number of backslashes escapes the line end
            parts.append(line[:-1])
            continue
        yield first, "".join([*parts, line])
        parts, first = [], 0
    if first:
        yield first, "".join(parts)


def _entry(line: int, joined: str) -> Entry:
    key_match = _KEY.match(joined)
    key_end = key_match.end() if key_match else 0
    separator = _SEPARATOR.match(joined, key_end)
    value_start = separator.end() if separator else key_end
    key = _unescape(line, joined[:key_end])
    if not key:
        raise ConfigurationError(f"line {line}: found {joined[:40]!r}, expected key=value")
    return Entry(key, _unescape(line, joined[value_start:]), line)


def _unescape(line: int, text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code: str = match.group(1)
        if code == "u":
            raise ConfigurationError(f"line {line}: malformed escape: expected \\u and four hex digits")
        if code[0] == "u":
            return chr(int(code[1:], 16))
        return _CONTROL.get(code, code)

    plain = _ESCAPE.sub(character, text)
    if "\0" in plain:
        raise ConfigurationError(f"line {line}: found a NUL character; expected text")
    try:
        # A character outside the BMP is written as two escapes, a surrogate pair.
        return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as err:
        raise ConfigurationError(f"line {line}: malformed escape: half of a surrogate pair") from err
