"""Stand-ins that tests of several rooms share; `pythonpath` of pytest's configuration leads here."""

import asyncio

from torchere.serving.batching.request import Answer, Request
from torchere.serving.errors import ServingError
from torchere.serving.types import InferResponse, StreamedResponse

# The beginning of a program for an interpreter of its own: `asked` gets the questions for GPUs. One to their
# driver before a fork would keep the forked processes from using them.
COUNTS_QUESTIONS_FOR_GPUS = """
import sys, threading
import torch

asked = []
questions = ("is_available", "device_count", "current_device", "get_device_capability", "_lazy_init")
for module in (torch.cuda, torch.xpu, torch.accelerator):
    for name in questions:
        if hasattr(module, name):
            setattr(module, name, lambda *args, name=f"{module.__name__}.{name}": asked.append(name) or False)
"""


class AwaitedRequest(Request):
    """A request whose client awaits `future`."""

    __slots__ = ("future",)

    def __init__(self, request_id: str, started_s: float) -> None:
        super().__init__(request_id, started_s)
        self.future: asyncio.Future[InferResponse | StreamedResponse] = (
            asyncio.get_running_loop().create_future()
        )

    def reply(self, outcome: Answer) -> None:
        """Give the client its answer, or raise the error where it awaits."""
        if self.future.done():
            return
        if isinstance(outcome, ServingError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)

    async def body(self) -> bytes:
        """Return the body of the complete response; raise the error that the client is told."""
        answer = await self.future
        assert isinstance(answer, InferResponse)
        return answer.body
