"""Stand-ins that tests of several rooms share; `pythonpath` of pytest's configuration leads here."""

import asyncio

from torchere.serving.batching.request import Answer, Request
from torchere.serving.errors import ServingError
from torchere.serving.types import InferResponse, StreamedResponse


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
