"""`model_archiver`: packs archives from Python, by torchere's archiver."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from torchere.archiver import ArchiveRequest, write_archive
from torchere.archiver.errors import PackingError
from torchere.archiver.model_flags import add_archive_arguments

__all__ = [
    "ArgParser",
    "ModelArchiver",
    "ModelArchiverConfig",
    "ModelArchiverError",
    "RuntimeType",
    "__version__",
    "generate_model_archive",
]
__version__ = "0.12.0"  # of the archiver whose interface this is

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
    def from_args(cls, args: argparse.Namespace) -> ModelArchiverConfig:
        """Return the configuration of parsed arguments."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})


class ArgParser:
    """The parser of `torch-model-archiver`."""

    @staticmethod
    def export_model_args_parser() -> argparse.ArgumentParser:
        """Return the parser."""
        parser = argparse.ArgumentParser(prog="torch-model-archiver")
        add_archive_arguments(parser)
        return parser


class ModelArchiver:
    """Packs archives."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        """Write the archive; see `generate_model_archive`."""
        generate_model_archive(config)


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Write the archive that `config` (None: the command line) describes.

    Raises:
        ModelArchiverError: the configuration can't be packed.
        FileNotFoundError: a file does not exist.
    """
    if config is None:
        config = ModelArchiverConfig.from_args(ArgParser.export_model_args_parser().parse_args(sys.argv[1:]))
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
        )
    )
