"""Look-up of the version for a request: pure functions on an immutable map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torchere.serving.errors import ModelNotFound, VersionNotFound
from torchere.serving.registry.version import Version


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The versions of one model, and its default version for requests that name none."""

    default_version: str
    versions: Mapping[str, Version]


ServingMap = Mapping[str, ServedModel]
EMPTY: ServingMap = MappingProxyType({})


def find(serving: ServingMap, model: str, version: str | None) -> Version:
    """Return the version for a model name and an optional version string (compared exactly).

    Raises:
        ModelNotFound, VersionNotFound.
    """
    served = serving.get(model)
    if served is None:
        raise ModelNotFound.named(model)
    found = served.versions.get(version or served.default_version)
    if found is None:
        raise VersionNotFound.of(model, version or "")
    return found


def with_version(serving: ServingMap, added: Version) -> ServingMap:
    """Return the map with one version added; the first version of a model is its default."""
    name, number = added.key
    served = serving.get(name) or ServedModel(number, MappingProxyType({}))
    versions = MappingProxyType({**served.versions, number: added})
    return MappingProxyType({**serving, name: ServedModel(served.default_version, versions)})


def without_version(serving: ServingMap, removed: Version) -> ServingMap:
    """Return the map without exactly this version; a model without versions is removed.

    A newer version object with the same name and number stays. If the removed version was the default, the
    oldest remaining one becomes the default.
    """
    name, number = removed.key
    served = serving.get(name)
    if served is None or served.versions.get(number) is not removed:
        return serving
    versions = {key: value for key, value in served.versions.items() if key != number}
    rest = {key: value for key, value in serving.items() if key != name}
    if versions:
        default = next(iter(versions)) if number == served.default_version else served.default_version
        rest[name] = ServedModel(default, MappingProxyType(versions))
    return MappingProxyType(rest)


def with_default(serving: ServingMap, model: str, version: str) -> ServingMap:
    """Return the map with another default version of one model, which must have that version."""
    return MappingProxyType({**serving, model: ServedModel(version, serving[model].versions)})
