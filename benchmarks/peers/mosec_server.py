"""The tiny MLP under mosec: `python mosec_server.py --port N`; `MODEL` names the TorchScript file.

`BATCH` is the largest batch, `WAIT_MS` how long it waits for company.
"""

from __future__ import annotations

import os

import torch
from mosec import Server, Worker  # type: ignore[import-not-found]  # lives in the peer's environment


class Mlp(Worker):  # type: ignore[misc]
    """{"x": [floats]} in, {"y": [floats]} out."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = torch.jit.load(os.environ["MODEL"])  # type: ignore[no-untyped-call]

    def forward(self, data: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
        """One batch."""
        with torch.inference_mode():
            output = self.model(torch.tensor([row["x"] for row in data]))
        return [{"y": row} for row in output.tolist()]


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Mlp, num=1, max_batch_size=int(os.environ["BATCH"]), max_wait_time=int(os.environ["WAIT_MS"])
    )
    server.run()
