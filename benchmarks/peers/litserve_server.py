"""The tiny MLP under LitServe: `MODEL=FILE PORT=N BATCH=32 WAIT_MS=1 python litserve_server.py`."""

from __future__ import annotations

import os

import litserve  # type: ignore[import-not-found]  # lives in the peer's environment
import torch


class Mlp(litserve.LitAPI):
    """{"x": [floats]} in, {"y": [floats]} out."""

    def setup(self, device: str) -> None:
        """Load the model."""
        torch.set_num_threads(1)
        self.model = torch.jit.load(os.environ["MODEL"])

    def decode_request(self, request: dict[str, list[float]]) -> list[float]:
        """The floats of one request."""
        return request["x"]

    def batch(self, inputs: list[list[float]]) -> torch.Tensor:
        """The requests as rows."""
        return torch.tensor(inputs)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """One batch."""
        with torch.inference_mode():
            return self.model(x)

    def unbatch(self, output: torch.Tensor) -> list[list[float]]:
        """The rows as answers."""
        return output.tolist()

    def encode_response(self, output: list[float]) -> dict[str, list[float]]:
        """One answer."""
        return {"y": output}


if __name__ == "__main__":
    api = Mlp(max_batch_size=int(os.environ["BATCH"]), batch_timeout=int(os.environ["WAIT_MS"]) / 1000)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(os.environ["PORT"]), generate_client_file=False, log_level="warning"
    )
