"""The module `model_archiver`: packs archives from Python with torchere's archiver."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from torchere.archiver import ArchiveRequest, write_archive
from torchere.archiver.errors import PackingError
from torchere.archiver.model_flags import add_archive_arguments

__all__ = [
    "ArgParser",
    "Manifest",
    "Model",
    "ModelArchiver",
    "ModelArchiverConfig",
    "ModelArchiverError",
    "ModelExportUtils",
    "RuntimeType",
    "__version__",
    "generate_model_archive",
    "package_model",
]
__version__ = "0.12.0"  # version of TorchServe's archiver that has this interface

ModelArchiverError = PackingError


class RuntimeType(Enum):
    """Runtimes of handlers."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


@dataclass
class ModelArchiverConfig:
    """One archive to write; the fields are the flags of `torch-model-archiver`."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = RuntimeType.PYTHON.value
    export_path: str = "."
    archive_format: str = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace | ModelArchiverConfig) -> ModelArchiverConfig:
        """Return the configuration of parsed arguments, with defaults for those that older scripts lack."""
        return cls(
            **{each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)}
        )


class Model:
    """The member `model` of a manifest."""

    def __init__(  # noqa: PLR0917  # the archiver's signature
        self,
        model_name: str,
        serialized_file: str | None,
        handler: str,
        model_file: str | None = None,
        model_version: str | None = None,
        extensions: str | None = None,
        requirements_file: str | None = None,
        config_file: str | None = None,
    ) -> None:
        said = {
            "modelName": model_name,
            "serializedFile": serialized_file and os.path.basename(serialized_file),
            "handler": os.path.basename(handler),
            "modelFile": model_file and os.path.basename(model_file),
            "modelVersion": model_version,
            "extensions": extensions,
            "requirementsFile": requirements_file and os.path.basename(requirements_file),
            "configFile": config_file and os.path.basename(config_file),
        }
        self.model_dict = {name: value for name, value in said.items() if value}

    def __str__(self) -> str:
        """Return the member as JSON."""
        return json.dumps(self.model_dict)


class Manifest:
    """A manifest as scripts make it; its text is JSON."""

    def __init__(self, runtime: str, model: Model) -> None:
        self.manifest_dict = {
            "createdOn": datetime.now().strftime("%d/%m/%Y %H:%M:%S"),
            "runtime": RuntimeType(runtime).value,
            "model": model.model_dict,
            "archiverVersion": __version__,
        }

    def __str__(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(self.manifest_dict, indent=2)


class ModelExportUtils:
    """The steps of packing that scripts call one by one."""

    @staticmethod
    def validate_inputs(model_name: str, export_path: str) -> None:
        """Raise ModelArchiverError for a name that no model may have, or a path of no directory."""
        ArchiveRequest(model_name=model_name, version="1.0", handler="").check()
        if not os.path.isdir(os.path.abspath(export_path)):
            raise ModelArchiverError(
                f"Given export-path {export_path} is not a directory. Point to a valid export-path directory."
            )

    @staticmethod
    def generate_model(modelcfg: ModelArchiverConfig | argparse.Namespace) -> Model:
        """Return the member `model` of the manifest."""
        config = ModelArchiverConfig.from_args(modelcfg)
        return Model(
            config.model_name,
            config.serialized_file,
            config.handler,
            config.model_file,
            config.version,
            requirements_file=config.requirements_file,
            config_file=config.config_file,
        )

    @staticmethod
    def generate_manifest_json(config: ModelArchiverConfig | argparse.Namespace) -> str:
        """Return the manifest as JSON."""
        return str(Manifest(config.runtime, ModelExportUtils.generate_model(config)))


class _ParserOfConfig(argparse.ArgumentParser):
    """A parser with the fields of `ModelArchiverConfig`; the first use of a field parses the command line."""

    def __getattr__(self, name: str) -> Any:
        names = [each.name for each in fields(ModelArchiverConfig)]
        if name not in names:
            raise AttributeError(name)
        parsed = ModelArchiverConfig.from_args(self.parse_args())
        for each in names:  # a field that a script has set keeps its value
            vars(self).setdefault(each, getattr(parsed, each))
        return vars(self)[name]


class ArgParser:
    """The parser of `torch-model-archiver`."""

    @staticmethod
    def export_model_args_parser() -> _ParserOfConfig:
        """Return the parser, as in TorchServe 0.7; it has the configuration's fields, which 0.12 returns."""
        parser = _ParserOfConfig(prog="torch-model-archiver")
        add_archive_arguments(parser)
        return parser


class ModelArchiver:
    """Packs archives."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        """Write the archive; see `generate_model_archive`."""
        generate_model_archive(config)


def package_model(config: ModelArchiverConfig | argparse.Namespace, manifest: str) -> None:
    """Write the archive of `config`, as the exporters of OpenMMLab's projects do.

    Members of `manifest` that TorchServe's manifests lack are kept in the archive; date and digests are new.

    Raises:
        ModelArchiverError: it can't be packed, or `manifest` says something else than `config`.
        FileNotFoundError: a file does not exist.
    """
    config = ModelArchiverConfig.from_args(config)
    given, made = json.loads(manifest), json.loads(ModelExportUtils.generate_manifest_json(config))
    compared = {name: given.get(name) for name in ("model", *given) if name in made and name != "createdOn"}
    if differing := {name: value for name, value in compared.items() if value != made[name]}:
        raise ModelArchiverError(f"the manifest differs from the arguments, which count: {differing}")
    added = {name: value for name, value in given.items() if name not in made and name != "torchere"}
    _write(config, added)


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Write the archive that `config` (None: the command line) describes.

    Raises:
        ModelArchiverError: the configuration can't be packed.
        FileNotFoundError: a file does not exist.
    """
    if config is None:
        config = ModelArchiverConfig.from_args(ArgParser.export_model_args_parser())
    _write(config, {})


def _write(config: ModelArchiverConfig, manifest_members: Mapping[str, Any]) -> None:
    extra = config.extra_files.split(",") if config.extra_files else []

    def path(text: str | None) -> Path | None:
        return Path(text) if text else None

    write_archive(
        ArchiveRequest(
            model_name=config.model_name,
            version=config.version,
            handler=config.handler,
            serialized_file=path(config.serialized_file),
            model_file=path(config.model_file),
            extra_files=tuple(item for item in extra if item.strip()),
            requirements_file=path(config.requirements_file),
            config_file=path(config.config_file),
            runtime=config.runtime,
            export_path=Path(config.export_path or os.curdir),
            archive_format=config.archive_format,
            force=config.force,
            manifest_members=manifest_members,
        )
    )
