"""The tiny MLP under Triton's Python backend; `MODEL` names the TorchScript file."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton_python_backend_utils as pb_utils  # made by Triton itself


class TritonPythonModel:
    """`x` [n, 64] FP32 in, `y` [n, 64] FP32 out; n requests are one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model."""
        torch.set_num_threads(1)
        self.model = torch.jit.load(os.environ["MODEL"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """One batch."""
        inputs = [
            torch.from_numpy(pb_utils.get_input_tensor_by_name(one, "x").as_numpy()) for one in requests
        ]
        with torch.inference_mode():
            output = self.model(torch.cat(inputs))
        rows = output.split([one.shape[0] for one in inputs])
        return [
            pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", row.numpy())]) for row in rows
        ]
