"""`MAR-INF/MANIFEST.json`: the metadata of an archive.

The layout is TorchServe 0.12.0's, so that its server loads the archives of this package. One more member,
`torchere`, holds the SHA-256 of every other file. TorchServe ignores members that it does not know, and so
does this package.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchere.archiver.container.entries import MANIFEST_NAME, problem_with
from torchere.archiver.errors import ArchiveError

# Version of TorchServe's archiver, which defines the format. Not this package's, because tools compare it.
FORMAT_VERSION = "0.12.0"
RUNTIMES = ("python", "python3", "LSP")
DEFAULT_VERSION = "1.0"
# 1980-01-01, the earliest time that a zip can hold. The date is fixed, because the time of packing, or of a
# checkout, would make two archives of the same inputs differ; SOURCE_DATE_EPOCH replaces the date.
EPOCH_S = 315532800

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TOP_MEMBERS = frozenset({"createdOn", "runtime", "model", "archiverVersion", "torchere"})
_FILE_MEMBERS = {
    "serializedFile": "serialized_file",
    "handler": "handler",
    "modelFile": "model_file",
    "requirementsFile": "requirements_file",
    "configFile": "config_file",
}


VERSION_RULE = "1 to 255 printable characters without '/'"


def is_version(text: str) -> bool:
    """Return whether a server accepts the text as the version of a model: `VERSION_RULE`."""
    return bool(text.strip()) and len(text) <= 255 and "/" not in text and text.isprintable()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of one archive; the defaults stand for an archive without a manifest.

    File members are names inside the archive; `handler` is a built-in name or `file[.py][:function]`.
    `digests` maps every file but the manifest to `sha256:` and 64 hex digits; None when not recorded.
    `unknown` and `unknown_in_model` keep members that this package does not use.
    """

    model_name: str | None = None
    model_version: str = DEFAULT_VERSION
    serialized_file: str | None = None
    handler: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    runtime: str = "python"
    created_on: str | None = None
    archiver_version: str | None = None
    digests: Mapping[str, str] | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)
    unknown_in_model: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, archive: str) -> Manifest:
        """Parse a manifest; `archive` is the name that errors give.

        Raises:
            ArchiveError: The text is not JSON, `model` is null, `runtime` is unknown, or a member has a wrong
                type or points outside the archive. A missing `model` or `modelName` is allowed, because
                registration may supply their values.
        """
        return _Parser(text, archive).manifest()

    def dump(self) -> str:
        """Return the JSON text with members in TorchServe's order, absent ones left out."""
        model: dict[str, Any] = {
            "modelName": self.model_name,
            "serializedFile": self.serialized_file,
            "handler": self.handler,
            "modelFile": self.model_file,
            "modelVersion": self.model_version,
            "requirementsFile": self.requirements_file,
            "configFile": self.config_file,
        }
        whole: dict[str, Any] = {
            "createdOn": self.created_on,
            "runtime": self.runtime,
            "model": _given(model) | dict(self.unknown_in_model),
        }
        ours: dict[str, Any] = {
            "archiverVersion": self.archiver_version,
            "torchere": None if self.digests is None else {"digests": dict(sorted(self.digests.items()))},
        }
        return json.dumps(_given(whole) | dict(self.unknown) | _given(ours), indent=2)


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in members.items() if value is not None}


def created_on(epoch_s: int) -> str:
    """Format seconds since 1970 as `createdOn`: `dd/mm/YYYY HH:MM:SS`, in UTC, because local times differ."""
    return time.strftime("%d/%m/%Y %H:%M:%S", time.gmtime(epoch_s))


class _Parser:
    """Parser of one manifest; `_refuse` returns the error of every check."""

    def __init__(self, text: str, archive: str) -> None:
        self._text = text
        self._archive = archive

    def manifest(self) -> Manifest:
        whole = self._object(self._json(), "the manifest")
        entry = whole.get("model", {})  # TorchServe rejects only a null
        if entry is None:
            raise self._refuse("Missing Model entry in manifest file.", "add a 'model' object")
        model = self._object(entry, "model")
        runtime = whole.get("runtime", "python")  # TorchServe's default, where the member is left out
        if runtime not in RUNTIMES:
            raise self._refuse(
                "Runtime is not defined or invalid.", f"set 'runtime' to one of {', '.join(RUNTIMES)}"
            )
        known = {"modelName", "modelVersion", *_FILE_MEMBERS}
        return Manifest(
            model_name=self._optional_text(model, "modelName"),
            model_version=self._version(model),
            runtime=runtime,
            created_on=self._remark(whole, "createdOn"),
            archiver_version=self._remark(whole, "archiverVersion"),
            digests=self._digests(whole.get("torchere")),
            unknown={key: value for key, value in whole.items() if key not in _TOP_MEMBERS},
            unknown_in_model={key: value for key, value in model.items() if key not in known},
            **{attribute: self._file(model, member) for member, attribute in _FILE_MEMBERS.items()},
        )

    def _json(self, **hooks: Any) -> Any:
        try:
            return json.loads(self._text, object_pairs_hook=self._without_twins, **hooks)
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"not valid JSON: {error}", "pack the archive again") from error

    def _without_twins(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise self._refuse(
                "a member is given twice", "keep one of them: readers differ in which one wins"
            )
        return found

    def _object(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._refuse(f"{what} is a {type(value).__name__}", "make it a JSON object")
        return value

    def _optional_text(self, members: Mapping[str, Any], key: str) -> str | None:
        value = members.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
            raise self._refuse(f"{key} is {ascii(value)[:60]}", "make it a text in quotes")
        return value

    def _remark(self, members: Mapping[str, Any], key: str) -> str | None:
        """Return a member as text, for members that no code depends on; a number is accepted, too."""
        value = members.get(key)
        return str(value) if isinstance(value, (int, float)) else self._optional_text(members, key)

    def _version(self, model: Mapping[str, Any]) -> str:
        if "modelVersion" not in model:
            return DEFAULT_VERSION
        value = model["modelVersion"]
        if value is None:
            raise self._refuse("Model version is not defined.", "set 'modelVersion', or leave it out for 1.0")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # TorchServe takes a bare number as it is spelt; a float would turn 1.10 into 1.1.
            spelt = self._json(parse_int=str, parse_float=str, parse_constant=str)["model"]["modelVersion"]
            return str(spelt)
        return self._optional_text(model, "modelVersion") or ""

    def _file(self, model: Mapping[str, Any], member: str) -> str | None:
        name = (self._optional_text(model, member) or "").removeprefix("./")
        path = name.partition(":")[0] if name and member == "handler" else name
        if path and (problem := problem_with(path)):
            raise self._refuse(f"{member} is {name!a}: {problem}", "name a file inside the archive")
        return name or None

    def _digests(self, extra: Any) -> dict[str, str] | None:
        if extra is None:
            return None
        digests = self._object(extra, "torchere").get("digests")
        if digests is None:
            return None
        for name, digest in self._object(digests, "torchere.digests").items():
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise self._refuse(
                    f"the digest of {ascii(name)[:80]} is {ascii(digest)[:80]}, not sha256:<64 hex digits>",
                    "pack the archive again, or read it with a newer torchere",
                )
        return dict(digests)

    def _refuse(self, reason: str, advice: str) -> ArchiveError:
        return ArchiveError(self._archive, reason, advice, entry=MANIFEST_NAME)
