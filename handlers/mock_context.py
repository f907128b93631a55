"""A stand-in for the context, for trying a handler without a server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from torchere.handlers.metrics_legacy import MetricsStore


class MockContext:
    """A context with the attributes that most handlers use; handlers import it for their own tests.

    Args:
        model_pt_file: the manifest's `serializedFile`; "" or None for none.
        model_dir: where the model's files are.
        model_file: the manifest's `modelFile`; "" or None for none.
        gpu_id: passed to the handler where CUDA is available.
        model_name: for the metrics.
        model_yaml_config_file: name of a YAML file in `model_dir` that becomes `model_yaml_config`.
    """

    def __init__(  # noqa: PLR0917  # TorchServe's signature
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        named = {"serializedFile": model_pt_file, "modelFile": model_file}
        self.model_name = model_name
        self.manifest = {"model": {key: name for key, name in named.items() if name}}
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if gpu_id and torch.cuda.is_available():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), model_name)
        self.model_yaml_config: dict[str, Any] = {}
        if model_yaml_config_file:
            self.model_yaml_config = _read_yaml(Path(model_dir, model_yaml_config_file))

    def get_request_header(self, idx: int, exp: str) -> bool:
        """Return whether a test has set `explain`; always False for request 0, as in TorchServe."""
        return bool(idx and exp and self.explain)


def _read_yaml(file: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415  # only where a test asks for it

    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
