"""Parsers for the JSON properties that describe models: `models` and `model_snapshot`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from torchere.serving.config.kinds import WHOLE, Kind, near
from torchere.serving.config.server_settings import OURS, SnapshotModel, SnapshotWorkflow, largest

UNSUPPORTED_KEYS = {
    "pippy": "PiPPy is archived; torch.distributed.pipelining has taken its place",
    "dali": "NVIDIA DALI is not supported",
}
"""Keys of TorchServe that have no effect here, and why."""

# Members of an entry of a model in the property `models`.
_ONLY_OF_MODELS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")  # no key is like these
_COUNTS = (*_ONLY_OF_MODELS, "responseTimeout", "startupTimeout")
_SNAPSHOT_FIELDS = ("defaultVersion", "marName", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")
_MEMBERS = frozenset((*_COUNTS, *_SNAPSHOT_FIELDS, *UNSUPPORTED_KEYS, "parallelLevel", "runtimeType", OURS))
_MOST_NAMED = 5  # unknown members named in a message
_SIMILAR_SETTING = 0.85  # difflib's ratio; below that of `batchdelay` to `maxbatchdelay`
_NEAR = 20  # characters shown on both sides of a place that is not JSON

_Models: TypeAlias = dict[str, dict[str, dict[str, object]]]


def unsupported_keys(raw: dict[str, Any]) -> list[str]:
    """Return the keys that request a feature the server does not support."""
    return [key for key in raw if key in UNSUPPORTED_KEYS and raw[key]]


def near_setting_of_models(key: str) -> str:
    """Suggest where to write a setting of models, as `batch_size`, that is no key of the file; "" for others.

    TorchServe's guides name `batch_size` and `batch_delay` as if they were keys.
    """
    spelt = {name.lower(): name for name in _ONLY_OF_MODELS}
    found = difflib.get_close_matches(key.replace("_", "").lower(), spelt, n=1, cutoff=_SIMILAR_SETTING)
    if not found:
        return ""
    return f"models have {spelt[found[0]]}: in their model-config.yaml, or in the key models"


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_shown(value)}, expected a JSON object")
    return value


def _shown(value: object) -> str:
    return json.dumps(value)[:40]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as err:
        # Without a line number: lines that end with a backslash are joined already.
        near = text[max(0, err.pos - _NEAR) : err.pos + _NEAR]
        raise ValueError(f"not JSON: {err.msg} at character {err.pos}, in {near!r}") from err
    except RecursionError as err:
        raise ValueError(f"not JSON: {err}") from err
    return _object(value, "the value")


def _without_twins(members: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}  # json.loads silently keeps the last of several members with the same name
    for name, value in members:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice")
        found[name] = value
    return found


def _versions(models: dict[str, Any]) -> _Models:
    """Return the settings by model and version; check that each level is a JSON object."""
    return {
        name: {
            version: _object(settings, f"version {version} of model {name}")
            for version, settings in _object(versions, f"model {name}").items()
        }
        for name, versions in models.items()
    }


def _each(models: _Models) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield (model, version, settings) for every entry."""
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


def _is_reversed(settings: dict[str, object]) -> bool:
    """Return whether an entry's minWorkers is above its maxWorkers; 0 means not set."""
    least, most = (_count(settings.get(key, 0), key, "", signed=True) for key in ("minWorkers", "maxWorkers"))
    return least > most > 0


def _count(value: object, key: str, model: str, signed: bool = False) -> int:
    if isinstance(value, str) and WHOLE.fullmatch(value):
        value = int(value)  # TorchServe accepts quoted numbers, which scripts write
    if isinstance(value, float) and value.is_integer():  # languages without integers write 4.0 for 4
        value = int(value)
    if type(value) is not int or (value < 0 and not signed):
        least = "" if signed else " of 0 or more"
        raise ValueError(f"{key} of {model} is {_shown(value)}, expected a whole number{least}")
    if value > largest(key):
        raise ValueError(f"{key} of {model} is too large, expected at most {largest(key)}")
    return value


def _read_snapshot(text: str) -> tuple[SnapshotModel | SnapshotWorkflow, ...]:
    snapshot = _json_object(text)
    models = _versions(_object(snapshot.get("models", {}), "models"))
    ours = _object(snapshot.get(OURS, {}), OURS)
    missing, workflows = _list(ours, "missing"), _list(ours, "workflows")
    served = [_snapshot_model(*one) for one in _each(models)]
    return (*served, *map(_never_served, missing), *map(_snapshot_workflow, workflows))


def _list(members: dict[str, Any], name: str) -> list[object]:
    found = members.get(name, [])
    if not isinstance(found, list):
        raise ValueError(f"{name} is {_shown(found)}, expected a JSON list")
    return found


def _snapshot_workflow(entry: object) -> SnapshotWorkflow:
    """Parse an element of the list `workflows`, our extension, which TorchServe ignores."""
    members = _object(entry, "a member of workflows")
    url, name = members.get("workflowUrl"), members.get("workflowName")
    if not (isinstance(url, str) and url and (name is None or isinstance(name, str))):
        raise ValueError(
            f"a member of workflows is {_shown(entry)}, expected workflowUrl and workflowName as texts"
        )
    # A client may have registered it with a number below 0, which means not set.
    response_s, startup_s = [
        _count(members[key], key, str(name), signed=True) if key in members else None
        for key in ("responseTimeout", "startupTimeout")
    ]
    signed, stored = (members.get(key) is True for key in ("s3SseKms", "onlyIfStored"))
    return SnapshotWorkflow(url, name, response_s, startup_s, signed, stored)


def _never_served(entry: object) -> SnapshotModel:
    """Parse an element of the list `missing`, our extension, which TorchServe ignores."""
    settings = _object(entry, "a member of missing")
    archive, name = settings.get("marName"), settings.get("modelName", "")
    if not (isinstance(archive, str) and archive and isinstance(name, str)):
        raise ValueError(f"a member of missing is {_shown(entry)}, expected marName and modelName as texts")
    rest = {key: value for key, value in settings.items() if key not in ("marName", "modelName")}
    return SnapshotModel(name, "", archive, False, rest)


def _snapshot_model(name: str, version: str, settings: dict[str, object]) -> SnapshotModel:
    missing = [field for field in _SNAPSHOT_FIELDS if field not in settings]
    if missing:
        raise ValueError(f"version {version} of model {name} lacks {', '.join(missing)}")
    archive, default = settings["marName"], settings["defaultVersion"]
    if not isinstance(archive, str) or not archive:
        raise ValueError(f"marName of {name} {version} is {_shown(archive)}, expected a file name")
    if isinstance(default, str) and default.lower() in ("true", "false"):  # may be quoted, like numbers
        default = default.lower() == "true"
    if not isinstance(default, bool):
        raise ValueError(f"defaultVersion of {name} {version} is {_shown(default)}, expected true or false")
    rest = {key: value for key, value in settings.items() if key not in ("marName", "defaultVersion")}
    # TorchServe's snapshots contain negative numbers for values that a registration omitted.
    rest |= {key: _count(rest[key], key, f"{name} {version}", signed=True) for key in _COUNTS if key in rest}
    return SnapshotModel(name, version, archive, default, rest)


def _remark_versions(models: dict[str, Any]) -> str:
    """Return one warning for each unsupported or contradictory key, and one for all unknown keys.

    A key is reported with the first model that sets it.
    """
    found: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name, version, settings in _each(_versions(models)):
        for key in unsupported_keys(settings):
            found.setdefault(key, f"{key} of {name} {version} has no effect: {UNSUPPORTED_KEYS[key]}")
        if _is_reversed(settings):
            remark = "is less than its minWorkers, which counts for both"
            found.setdefault("maxWorkers", f"maxWorkers of {name} {version} {remark}")
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
