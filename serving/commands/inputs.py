"""Prepare pictures for a model as the handler of its archive does: for `archive`, `convert` and `compare`.

Also reads the model-config.yaml that is packed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchere.archiver.errors import ModelRefused
from torchere.serving.errors import InvalidArchive

if TYPE_CHECKING:
    from torchere.archiver.request import Prepare
    from torchere.handlers.model_inputs import ModelInputs


def prepare_for(handler: str, folder: Path | None, config_file: Path | None) -> Prepare:
    """Return the function by which a handler prepares the body of a request, for `BuildOptions.prepare`.

    The handler is imported at the first call, and its configuration read, so its code runs only if there is a
    body to prepare.

    Args:
        handler: as in the manifest.
        folder: of the handler's file; None if it is built in.
        config_file: model-config.yaml, if there is one.
    """

    @functools.cache
    def inputs() -> ModelInputs | None:
        from torchere.handlers.model_inputs import model_inputs  # noqa: PLC0415 - imports torch

        return model_inputs(handler, folder, read_config(config_file) if config_file else {})

    def prepare(body: bytes) -> Any:
        found = inputs()
        return None if found is None else found(body)

    return prepare


def read_config(file: Path) -> dict[str, Any]:
    """Return the content of a model-config.yaml; raise ModelRefused if a server would refuse the file."""
    from torchere.serving.config.model_settings import parse_model_config  # noqa: PLC0415 - not for --help

    try:
        return parse_model_config(file.read_text(encoding="utf-8")).raw
    except InvalidArchive as error:
        raise ModelRefused(f"{file}: {error}") from error
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{file} is not UTF-8: {error}; save it as UTF-8") from error
