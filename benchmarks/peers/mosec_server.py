"""The tiny MLP under mosec: `python mosec_server.py --port N`; `MODEL` names the TorchScript file.

`BATCH` is the largest batch, `WAIT_MS` how long it waits for company. `FAST_JSON=1` puts orjson in the place
of mosec's own JSON, which indents its answers and so is written by Python.
"""

from __future__ import annotations

import os
from typing import Any

import orjson  # lives in the peer's environment, as mosec does
import torch
from mosec import Server, Worker  # type: ignore[import-not-found]  # lives in the peer's environment


class Mlp(Worker):
    """{"x": [floats]} in, {"y": [floats]} out."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = torch.jit.load(os.environ["MODEL"])

    def forward(self, data: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
        """One batch."""
        with torch.inference_mode():
            output = self.model(torch.tensor([row["x"] for row in data]))
        return [{"y": row} for row in output.tolist()]


class FastJsonMlp(Mlp):
    """The same, with JSON that is read and written in native code."""

    def deserialize(self, data: bytes) -> Any:
        """One request."""
        return orjson.loads(data)

    def serialize(self, data: Any) -> bytes:
        """One answer."""
        answer: bytes = orjson.dumps(data)
        return answer


if __name__ == "__main__":
    server = Server()
    worker = FastJsonMlp if os.environ.get("FAST_JSON") else Mlp
    server.append_worker(
        worker, num=1, max_batch_size=int(os.environ["BATCH"]), max_wait_time=int(os.environ["WAIT_MS"])
    )
    server.run()
