"""Options for loading a TorchScript file: the section `torchscript` of model-config.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TorchScriptOptions:
    """Options that the packer measured to be best, and that the server applies when it loads the model."""

    quantized_engine: str | None = None  # engine that int8 weights are packed for; None: the process's own
    optimize_for_inference: bool = False  # on a CPU; see archiver/models/load/torchscript.py

    @staticmethod
    def read(config: Mapping[str, Any]) -> TorchScriptOptions:
        """Read the options from a whole model-config.yaml; unknown members of the section are ignored.

        With `autocast`, `optimize_for_inference` is off, because weights that are packed in float32 can't be
        multiplied by another type.

        Raises:
            ValueError: `optimize_for_inference` is neither true nor false.
        """
        section = config.get("torchscript")
        if not isinstance(section, Mapping):
            return TorchScriptOptions()
        optimize = section.get("optimize_for_inference")
        if not isinstance(optimize, (bool, type(None))):
            raise ValueError(
                f"torchscript.optimize_for_inference in model-config.yaml is {optimize!r}; expected true or "
                "false"
            )
        return TorchScriptOptions(
            section.get("quantized_engine"), bool(optimize) and config.get("autocast") is None
        )

    def lines(self) -> list[str]:
        """Return the members of the section as YAML, one line each; an empty list if all are defaults."""
        said = [f"quantized_engine: {self.quantized_engine}"] if self.quantized_engine else []
        return said + (["optimize_for_inference: true"] if self.optimize_for_inference else [])
