"""The kinds of values a property can have: how its text is read, and what to say when it can't be."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torchere.serving.registry.model_config import UNSUPPORTED_KEYS, unsupported_keys
from torchere.serving.settings import MAX_NUMBER, Address, SnapshotModel, largest

MAX_PORT = 65_535
# Beyond a century a key may as well never expire; it also keeps the date of expiry printable.
MAX_EXPIRATION_MIN = 100 * 365 * 24 * 60

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # int() alone would take underscores and other scripts' digits
_TCP = re.compile(r"(https?)://(\[[0-9a-f:.%]+\]|[^\s:/\[\]]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_UNIX = re.compile(r"unix:(/.*)", re.IGNORECASE)
# Of a model's entry in the property `models`.
_COUNTS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")
_SNAPSHOT_FIELDS = ("defaultVersion", "marName", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")
# The last two are ours, in snapshots.
_MEMBERS = frozenset((*_COUNTS, *_SNAPSHOT_FIELDS, *UNSUPPORTED_KEYS, "runtimeType", "handler", "path"))
_MOST_NAMED = 5  # unknown members in a message


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    `read` turns text without outer blanks into the value, or raises ValueError; a text in the exception says
    more than `expected` can. `remark` returns a warning about a value that reads, but maybe not as meant.
    """

    expected: str
    read: Callable[[str], object]
    remark: Callable[[str], str] | None = None


def near(name: str, known: Collection[str]) -> str:
    """The question whether a known name was meant; "" when none is like it."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {found[0]}?" if found else ""


def _read_boolean(text: str) -> bool:
    return text.lower() == "true"


def _remark_boolean(text: str) -> str:
    if text.lower() in ("true", "false"):
        return ""
    return f"found {text!r}, which counts as false; write true or false"


BOOLEAN = Kind("true or false", _read_boolean, _remark_boolean)
INVERTED_BOOLEAN = Kind("true or false", lambda text: not _read_boolean(text), _remark_boolean)

# The environment variable of Open Inference Protocol says `oip` where the file says `true`.
PROTOCOL_SWITCH = Kind(
    "true or false (in the environment: oip)", lambda text: text.lower() in ("true", "oip")
)


def whole(minimum: int, maximum: int | None = None) -> Kind:
    """A whole number in these bounds, both included."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def read(text: str) -> int:
        if not _WHOLE.fullmatch(text):
            raise ValueError
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError
        return number

    return Kind(f"a whole number {bounds}", read)


def seconds(minimum: float) -> Kind:
    """Seconds, fractions allowed, at least `minimum`."""
    expected = f"seconds, at least {minimum:g} and at most {MAX_NUMBER}"
    return Kind(expected, lambda text: _finite(text, minimum, MAX_NUMBER))


def _finite(text: str, minimum: float, maximum: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError from None  # its own words say less than the kind's
    if not minimum <= number <= maximum:  # neither is anything else than finite
        raise ValueError
    return number


def _read_expiration(text: str) -> float:
    minutes = _finite(text, 0.0, MAX_EXPIRATION_MIN)
    if minutes == 0:
        raise ValueError
    return minutes


EXPIRATION = Kind("minutes over 0, at most a century", _read_expiration)
TEXT = Kind("text", lambda text: text)
OPTIONAL_TEXT = Kind("text", lambda text: text or None)
PATH = Kind("a path", lambda text: Path(text) if text else None)


def address(http_port: int, https_port: int) -> Kind:
    """A REST address; the ports are those of an address that names none."""

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
            raise ValueError(f"Invalid binding address: {text}")
        return Address(host=host.strip("[]"), port=number, tls=tls)

    return Kind("http://host[:port], https://host[:port] or unix:/absolute/path", read)


def _read_host(text: str) -> str:
    if not re.fullmatch(r"\[?[^\s/\[\]]+\]?", text):
        raise ValueError
    return text.strip("[]")


HOST = Kind("a host name or IP address, without scheme and port", _read_host)


def _read_models(text: str) -> tuple[str, ...]:
    items = tuple(item.strip() for item in text.split(",") if item.strip())
    return ("all",) if [item.lower() for item in items] == ["all"] else items


MODELS = Kind("all, or a comma-separated list of [name=]archive", _read_models)


def _read_pattern(text: str) -> str | None:
    if not text:
        return None
    try:
        re.compile(text)
    except (re.error, RecursionError) as err:
        raise ValueError(f"{text!r} is not a regular expression: {err}") from err
    return text


def _read_patterns(text: str) -> tuple[str, ...]:
    parts = (part.strip() for part in text.split(","))
    return tuple(pattern for part in parts if (pattern := _read_pattern(part)))


PATTERN = Kind("a regular expression", _read_pattern)
PATTERNS = Kind("comma-separated regular expressions", _read_patterns)


def _read_metrics_mode(text: str) -> str:
    mode = "".join(text.split()).lower()
    if mode not in ("log", "prometheus", "legacy"):
        raise ValueError
    return mode


METRICS_MODE = Kind("log, prometheus or legacy", _read_metrics_mode)

_Models: TypeAlias = dict[str, dict[str, dict[str, object]]]


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_shown(value)}, expected a JSON object")
    return value


def _shown(value: object) -> str:
    return json.dumps(value)[:40]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_twins)
    except (json.JSONDecodeError, RecursionError) as err:
        raise ValueError(f"not JSON: {err}") from err
    return _object(value, "the value")


def _without_twins(members: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}  # of two with one name, one would be lost unseen
    for name, value in members:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice")
        found[name] = value
    return found


def _versions(models: dict[str, Any]) -> _Models:
    """By model and version the settings, each level checked to be an object."""
    return {
        name: {
            version: _object(settings, f"version {version} of model {name}")
            for version, settings in _object(versions, f"model {name}").items()
        }
        for name, versions in models.items()
    }


def _each(models: _Models) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Model, version and settings, one after the other."""
    for name, versions in models.items():
        for version, settings in versions.items():
            yield name, version, settings


def _read_defaults(text: str) -> _Models:
    models = _versions(_json_object(text))
    for name, version, settings in _each(models):
        for key in _COUNTS:
            if key in settings:
                settings[key] = _count(settings[key], key, f"{name} {version}")
    return models


def _count(value: object, key: str, model: str, signed: bool = False) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)  # TorchServe takes numbers in quotes, and scripts write them so
    if type(value) is not int or (value < 0 and not signed):
        least = "" if signed else " of 0 or more"
        raise ValueError(f"{key} of {model} is {_shown(value)}, expected a whole number{least}")
    if value > largest(key):
        raise ValueError(f"{key} of {model} is too large, expected at most {largest(key)}")
    return value


def _read_snapshot(text: str) -> tuple[SnapshotModel, ...]:
    models = _versions(_object(_json_object(text).get("models", {}), "models"))
    return tuple(_snapshot_model(*one) for one in _each(models))


def _snapshot_model(name: str, version: str, settings: dict[str, object]) -> SnapshotModel:
    missing = [field for field in _SNAPSHOT_FIELDS if field not in settings]
    if missing:
        raise ValueError(f"version {version} of model {name} lacks {', '.join(missing)}")
    archive, default = settings["marName"], settings["defaultVersion"]
    if not isinstance(archive, str) or not archive:
        raise ValueError(f"marName of {name} {version} is {_shown(archive)}, expected a file name")
    if not isinstance(default, bool):
        raise ValueError(f"defaultVersion of {name} {version} is {_shown(default)}, expected true or false")
    rest = {key: value for key, value in settings.items() if key not in ("marName", "defaultVersion")}
    # TorchServe's own hold numbers below 0: what a registration left out.
    rest |= {key: _count(rest[key], key, f"{name} {version}", signed=True) for key in _COUNTS if key in rest}
    return SnapshotModel(name, version, archive, default, rest)


def _remark_versions(models: dict[str, Any]) -> str:
    """A sentence for each key that asks for what the server can't do, and one for those that are unknown.

    Each names the first model with the key.
    """
    found: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name, version, settings in _each(_versions(models)):
        for key in unsupported_keys(settings):
            found.setdefault(key, f"{key} of {name} {version} has no effect: {UNSUPPORTED_KEYS[key]}")
        for key in settings.keys() - _MEMBERS:
            unknown.setdefault(key, f"{key} of {name} {version}")
    return "; ".join([*found.values(), *_remark_unknown(unknown)])


def _remark_unknown(places: dict[str, str]) -> Iterator[str]:
    if not places:
        return
    named = []
    for key in sorted(places)[:_MOST_NAMED]:
        question = near(key, _MEMBERS)
        named.append(f"{places[key]} ({question})" if question else places[key])
    more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
    yield f"unknown keys, not used: {', '.join(named)}{more}"


MODEL_DEFAULTS = Kind(
    '{"model": {"version": {...}}}',
    _read_defaults,
    lambda text: _remark_versions(_json_object(text)),
)
SNAPSHOT = Kind(
    '{"models": {"model": {"version": {...}}}}',
    _read_snapshot,
    lambda text: _remark_versions(_json_object(text).get("models", {})),
)
