"""What to pack, said once, and everything about it that can be decided without opening a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torchere.archiver.errors import PackingError
from torchere.archiver.manifest import (
    DEFAULT_VERSION,
    EPOCH_S,
    FORMAT_VERSION,
    RUNTIMES,
    Manifest,
    created_on,
)

ArchiveFormat = Literal["default", "zip-store", "tgz", "no-archive"]
FORMATS: tuple[str, ...] = get_args(ArchiveFormat)

BUILT_IN_HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "tensor",  # any model with a signature.json
    "text_classifier",
    "text_embedding",
    "voice_activity",
)
"""Handlers that need no file, because our server has them."""

# TorchServe 0.12's server has these, so its archiver asks for no file. Ours packs them for it, as it does.
_BUILT_IN_PYTHON = frozenset({*BUILT_IN_HANDLERS, "dali_image_classifier", "vllm_handler", "trt_llm_handler"})
_BUILT_IN_CPP = frozenset({"BaseHandler", "TorchScriptHandler"})
_SUFFIXES = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRequest:
    """One archive to write; see `write_archive`.

    `handler` is a built-in name, or a Python file with or without `.py` and `:function`; "" leaves it to the
    server's `default_service_handler`. Each of `extra_files` is a file, a directory (its contents go to the
    archive's root) or a glob pattern.
    `leave_out` has entry names that they must not bring. `made` is a folder of files that go in under their
    relative names, each instead of an extra file of that name.
    `epoch_s` (seconds since 1970, UTC) becomes `createdOn`; the same request with the same files always
    gives the same bytes, on the same release of Python and zlib. `output`, a path in `export_path`, is for an
    archive that is not named after its model.
    """

    model_name: str
    version: str
    handler: str
    serialized_file: str | Path | None = None
    model_file: str | Path | None = None
    extra_files: tuple[str | Path, ...] = ()
    leave_out: frozenset[str] = frozenset()
    made: str | Path | None = None
    requirements_file: str | Path | None = None
    config_file: str | Path | None = None
    runtime: str = "python"
    export_path: str | Path = "."
    output: str | Path | None = None
    archive_format: ArchiveFormat = "default"
    force: bool = False
    epoch_s: int = EPOCH_S

    @property
    def target(self) -> Path:
        """Where the archive will be: `output`, or `<export_path>/<model_name>` with its format's suffix."""
        if self.output is not None:
            return Path(self.output)
        return Path(self.export_path) / f"{self.model_name}{_SUFFIXES[self.archive_format]}"

    def check(self) -> None:
        """Raise PackingError when a field has a value that no archive can have."""
        if not _MODEL_NAME.fullmatch(self.model_name):
            raise PackingError(
                "Model name contains special characters.\nThe allowed regular expression filter for model "
                f"name is: ^{_MODEL_NAME.pattern}$"
            )
        if self.archive_format not in FORMATS:
            raise PackingError(f"archive format is {self.archive_format!r}; use one of {', '.join(FORMATS)}")
        if self.runtime not in RUNTIMES:
            raise PackingError(f"runtime is {self.runtime!r}; use one of {', '.join(RUNTIMES)}")

    def handler_file(self) -> Path | None:
        """The file that `handler` names, or None for a handler that the server brings or is to choose."""
        if self.handler in (_BUILT_IN_CPP if self.runtime == "LSP" else _BUILT_IN_PYTHON) or not self.handler:
            return None
        suffix = _cpp_suffix() if self.runtime == "LSP" else ".py"
        path = Path(self.handler)
        name = path.name.partition(":")[0]  # as the server reads it; a colon before the name is a drive's
        return path.parent / (name if name.endswith(suffix) else f"{name}{suffix}")

    def manifest(self, digests: Mapping[str, str]) -> Manifest:
        """The manifest of the archive whose files have these digests.

        A folder records none: weights are moved into it, and its files edited, after it was made.
        """
        return Manifest(
            model_name=self.model_name,
            model_version=self.version or DEFAULT_VERSION,
            serialized_file=_base_name(self.serialized_file),
            handler=_base_name(self.handler),
            model_file=_base_name(self.model_file),
            requirements_file=_base_name(self.requirements_file),
            config_file=_base_name(self.config_file),
            runtime=self.runtime,
            created_on=created_on(self.epoch_s),
            archiver_version=FORMAT_VERSION,
            digests=None if self.archive_format == "no-archive" else digests,
        )


def _base_name(path: str | Path | None) -> str | None:
    return Path(path).name if path else None


def _cpp_suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"
