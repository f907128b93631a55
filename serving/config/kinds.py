"""The types of property values: the parser of each, and the expected form for error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchere.handlers.built_in import ENVELOPES
from torchere.serving.config.server_settings import (
    ISOLATIONS,
    MAX_NUMBER,
    METRICS_MODES,
    SANDBOX_LEVELS,
    STAGE_SERIES,
    Address,
)

MAX_PORT = 65_535
# 100 years is practically forever, and the expiry date is still representable.
MAX_EXPIRATION_MIN = 100 * 365 * 24 * 60

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # int() also accepts underscores and non-ASCII digits
_NUMBER = re.compile(r"[0-9a-z+.-]+", re.IGNORECASE)  # likewise for float()
_IPV6 = r"\[[0-9a-f:.]+(?:%[^\s/\[\]]+)?\]"  # maybe with a zone, which is the name of a network interface
_TCP = re.compile(rf"(https?)://({_IPV6}|[^\s:/\[\]]+)(?::([0-9]{{1,5}}))?", re.IGNORECASE)
_UNIX = re.compile(r"unix:(/.*)", re.IGNORECASE)
_REMOTE = re.compile(r"(\s*(?:[^/=]*=)?[a-z0-9]+://)(?:[^/?]*@)?([^?]*)", re.IGNORECASE)  # maybe after name=


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of value.

    `read` parses text that is not empty, or raises ValueError; the exception's message, if any, replaces the
    generic one. `remark` returns a warning about a valid value that may not be intended, or "". `shown`
    returns the text for messages, without secrets.
    """

    expected: str
    read: Callable[[str], object]
    remark: Callable[[str], str] | None = None
    shown: Callable[[str], str] = str


def near(name: str, known: Collection[str], similarity: float = 0.6) -> str:
    """Suggest the most similar known name; "" if none reaches `similarity` (difflib's ratio, 0 to 1)."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=similarity)
    return f"did you mean {found[0]}?" if found else ""


def _read_boolean(text: str) -> bool:
    return text.lower() == "true"


def _remark_boolean(text: str) -> str:
    if text.lower() in ("true", "false"):
        return ""
    return f"found {text!r}, which counts as false; write true or false"


BOOLEAN = Kind("true or false", _read_boolean, _remark_boolean)
INVERTED_BOOLEAN = Kind("true or false", lambda text: not _read_boolean(text), _remark_boolean)


def _remark_ipex(text: str) -> str:
    if not _read_boolean(text):
        return _remark_boolean(text)
    return (
        "Intel's extension is retired: without it, models get the layout that torch's oneDNN kernels prefer"
    )


IPEX = Kind("true or false", _read_boolean, _remark_ipex)


OPENNESS = Kind(
    "true, false or local",
    lambda text: "local" if text.lower() == "local" else _read_boolean(text),
    lambda text: "" if text.lower() == "local" else _remark_boolean(text),
)

# In the environment variable of the Open Inference Protocol, `oip` means `true`.
PROTOCOL_SWITCH = Kind(
    "true or false (in the environment: oip)", lambda text: text.lower() in ("true", "oip")
)


def whole(minimum: int, maximum: int | None = None) -> Kind:
    """Return the kind of whole numbers between `minimum` and `maximum`, inclusive."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def read(text: str) -> int:
        if not WHOLE.fullmatch(text):
            raise ValueError
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError
        return number

    return Kind(f"a whole number {bounds}", read)


_AGE = whole(1)
_NO_LIMIT = str(2**63 - 1)  # TorchServe's default, the largest long of Java
AGE = Kind(_AGE.expected, lambda text: None if text == _NO_LIMIT else _AGE.read(text))

_UNITS = {
    "": 1,
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([a-z]{0,3})", re.IGNORECASE)


def size(minimum: int) -> Kind:
    """Return the kind of sizes in bytes of at least `minimum`; a unit may follow the number."""

    def read(text: str) -> int:
        if WHOLE.fullmatch(text):
            number = int(text)
        else:
            match = _SIZE.fullmatch(text)
            if match is None or match.group(2).lower() not in _UNITS:
                raise ValueError
            number = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
        if number < minimum:
            raise ValueError
        return number

    return Kind(f"bytes, a whole number of at least {minimum}, or with a unit (6MB, 6MiB)", read)


def seconds(minimum: float) -> Kind:
    """Return the kind of durations in seconds, fractions allowed, from `minimum` to `MAX_NUMBER`."""
    expected = f"seconds, at least {minimum:g} and at most {MAX_NUMBER}"
    return Kind(expected, lambda text: _finite(text, minimum, MAX_NUMBER))


def number(minimum: float, maximum: float) -> Kind:
    """Return the kind of numbers, fractions allowed, from `minimum` to `maximum`."""
    expected = f"a number from {minimum:g} to {maximum:g}"
    return Kind(expected, lambda text: _finite(text, minimum, maximum))


def _finite(text: str, minimum: float, maximum: float) -> float:
    if not _NUMBER.fullmatch(text):
        raise ValueError
    try:
        number = float(text)
    except ValueError:
        raise ValueError from None  # the message of the kind is more helpful
    if not minimum <= number <= maximum:  # also false for NaN; infinity is out of range
        raise ValueError
    return number


def _read_expiration(text: str) -> float:
    minutes = _finite(text, 0.0, MAX_EXPIRATION_MIN)
    if minutes == 0:
        raise ValueError
    return minutes


EXPIRATION = Kind("minutes over 0, at most a century", _read_expiration)
TEXT = Kind("text", lambda text: text)


def _read_header(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}", text):
        raise ValueError
    return text


HEADER = Kind("the name of a header", _read_header)
PATH = Kind("a path", Path)
PATHS = Kind("comma-separated paths", lambda text: tuple(Path(item) for item in _items(text)))


def address(http_port: int, https_port: int) -> Kind:
    """Return the kind of REST addresses; the arguments are the default ports of the two schemes."""

    def read(text: str) -> Address:
        if unix := _UNIX.fullmatch(text):
            return Address(unix_path=unix.group(1))
        tcp = _TCP.fullmatch(text)
        if tcp is None:
            raise ValueError(f"Invalid binding address: {text}")
        scheme, host, port = tcp.groups()
        tls = scheme.lower() == "https"
        number = int(port) if port else (https_port if tls else http_port)
        if number > MAX_PORT:
            raise ValueError(f"Invalid port number: {text}")
        return Address(host=host.strip("[]"), port=number, tls=tls)

    return Kind("http://host[:port], https://host[:port] or unix:/absolute/path", read)


def _read_host(text: str) -> str:
    if not re.fullmatch(r"\[?[^\s/\[\]]+\]?", text) or text.count(":") == 1:  # one colon: a port follows
        raise ValueError
    return text.strip("[]")


HOST = Kind("a host name or IP address, without scheme and port", _read_host)


_NO_MODELS = ("standalone", "n/a")  # "no models" in TorchServe's documentation


def _read_models(text: str) -> tuple[str, ...]:
    if text.lower() in _NO_MODELS:
        return ()
    items = _items(text)
    if [item.lower() for item in items] == ["all"]:
        return ("all",)
    return tuple(item for item in items if not _names_nothing(item))


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _names_nothing(item: str) -> bool:
    return item.endswith("=") and "/" not in item  # a URL has a "/", and its query may end in "="


def _remark_models(text: str) -> str:
    empty = [item for item in _items(text) if _names_nothing(item)]
    return f"{', '.join(empty)} names no archive, and is passed over" if empty else ""


def shown_url(url: str) -> str:
    """Return a URL, or name=URL, for logs and descriptions: without user and query, which may be secret.

    >>> shown_url("https://user:word@bucket/m.mar?X-Amz-Signature=0f"), shown_url("a?b.mar")
    ('https://bucket/m.mar', 'a?b.mar')
    """
    found = _REMOTE.match(url)
    return f"{found[1]}{found[2]}" if found else url


MODELS = Kind(
    "all, or a comma-separated list of [name=]archive",
    _read_models,
    _remark_models,
    lambda text: ",".join(map(shown_url, text.split(","))),
)


def _read_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError) as err:
        raise ValueError(f"{text!r} is not a regular expression: {err}") from err
    return text


PATTERN = Kind("a regular expression", _read_pattern)
PATTERNS = Kind("comma-separated regular expressions", lambda text: tuple(map(_read_pattern, _items(text))))


_HOST_NAME = re.compile(r"\*|[0-9a-z_-]+(\.[0-9a-z_-]+)*")


def _read_hosts(text: str) -> tuple[str, ...]:
    names = _items(text.lower())
    if not all(map(_HOST_NAME.fullmatch, names)):
        raise ValueError
    return names


HOSTS = Kind("comma-separated host names without scheme and port, or *", _read_hosts)


def _read_modules(text: str) -> tuple[str, ...]:
    names = _items(text)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError
    return names


MODULES = Kind("comma-separated names of Python modules", _read_modules)


def _one_of(names: Sequence[str]) -> Kind:
    """Return a kind with these values, in any case; TorchServe ignores blanks inside `metrics_mode`."""

    def read(text: str) -> str:
        name = "".join(text.split()).lower()
        if name not in names:
            raise ValueError
        return name

    return Kind(f"{', '.join(names[:-1])} or {names[-1]}", read)


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")  # those of `logs/lines.py`, a room above
_LOG_LEVEL = re.compile(rf"([\w.-]{{1,200}})=({'|'.join(LOG_LEVELS)})", re.IGNORECASE)


def _read_log_levels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in _items(text):
        match = _LOG_LEVEL.fullmatch(item)
        if match is None or match[1] in found:
            raise ValueError(f"found {item!r}" if match is None else f"{match[1]} is there twice")
        found[match[1]] = match[2].upper()
    return found


LOGGER_LEVELS = Kind(
    f"comma-separated LOGGER=LEVEL; levels are {', '.join(LOG_LEVELS)}, and root is the logger of all others",
    _read_log_levels,
)


# Names of TorchServe's earlier releases, which configurations for KServe still use.
_RENAMED_ENVELOPES = {"kfserving": "kserve", "kfservingv2": "kservev2"}


def _read_envelope(text: str) -> str:
    name = _RENAMED_ENVELOPES.get(text, text)
    if name not in ENVELOPES:
        raise ValueError
    return name


ENVELOPE = Kind(f"one of {', '.join(ENVELOPES)}", _read_envelope)
ISOLATION = _one_of(ISOLATIONS)
SANDBOX = _one_of(SANDBOX_LEVELS)
METRICS_MODE = _one_of(METRICS_MODES)
STAGES = _one_of(STAGE_SERIES)
