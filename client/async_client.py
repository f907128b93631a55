"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from torchere.client import inference, management, predictions
from torchere.client.client import INFERENCE_ADDRESS, MANAGEMENT_ADDRESS, TIMEOUT_S
from torchere.client.errors import ClientError
from torchere.client.exchange import Api, Operation, Result, refusal
from torchere.client.inference import InferOptions, InferResult, Inputs
from torchere.client.management import ModelEntry, ModelMetadata, ModelState, ServerMetadata
from torchere.client.predictions import PartLike, Prediction
from torchere.client.transport import ClientCall, Retries, Settings, answer_of


class AsyncClient:
    """The asyncio counterpart of `Client`, with the same arguments, methods and errors.

    Use it in one process, on one event loop; any number of calls may run at once. Cancelling a call closes
    its connection, and the server drops the request.

    Example:
        async with AsyncClient() as client:
            answers = await asyncio.gather(*(client.predict("net", image) for image in images))
    """

    def __init__(
        self,
        address: str = INFERENCE_ADDRESS,
        *,
        management_address: str = MANAGEMENT_ADDRESS,
        token: str | None = None,
        management_token: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        addresses: dict[Api, str] = {"inference": address, "management": management_address}
        tokens: dict[Api, str | None] = {"inference": token, "management": management_token}
        self._settings = Settings(addresses, tokens, timeout_s, retries, headers)
        self._http = self._settings.http(httpx.AsyncClient, transport, httpx.AsyncHTTPTransport)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; running calls fail."""
        await self._http.aclose()

    async def predict(
        self,
        model: str,
        data: object = None,
        *,
        version: str | None = None,
        content_type: str | None = None,
        files: Mapping[str, PartLike] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Prediction:
        """Send a request to `/predictions` and return the response. See `Client.predict`."""
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, files=files, headers=headers
        )
        return await self._run(operation, timeout_s)

    def predict_stream(
        self,
        model: str,
        data: object = None,
        *,
        version: str | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Send a request to `/predictions` and yield the parts of the response. See `Client.predict_stream`.

        To stop early, close the generator (`contextlib.aclosing`): this cancels the request.

        Example:
            async for part in client.predict_stream("llm", "Once upon a time"):
                print(part.decode(), end="")
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, headers=headers
        )
        return self._stream(operation, timeout_s)

    async def explain(
        self, model: str, data: object = None, *, version: str | None = None, timeout_s: float | None = None
    ) -> Prediction:
        """Send a request to `/explanations` and return the response. See `predict`."""
        operation = predictions.predict(model, data, version=version, verb="explanations")
        return await self._run(operation, timeout_s)

    async def ping(self, *, timeout_s: float | None = None) -> bool:
        """Return whether every model has the executors it should have (TorchServe's `/ping`)."""
        return await self._run(management.HEALTHY, timeout_s)

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        options: InferOptions | None = None,
        *,
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> InferResult:
        """Run a model by the Open Inference Protocol. See `Client.infer`."""
        operation = inference.infer(model, inputs, options, version=version, headers=headers)
        return await self._run(operation, timeout_s)

    async def infer_stream(
        self,
        model: str,
        inputs: Inputs,
        options: InferOptions | None = None,
        *,
        version: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[InferResult, None]:
        """Run a model by the Open Inference Protocol and yield streamed results. See `predict_stream`."""
        operation = inference.infer_stream(model, inputs, options, version=version)
        events = inference.Events()
        async with aclosing(self._stream(operation, timeout_s)) as parts:
            async for part in parts:
                for result in events.feed(part):
                    yield result
        events.end()

    async def server_metadata(self, *, timeout_s: float | None = None) -> ServerMetadata:
        """Return the server's name, version and protocol extensions."""
        return await self._run(management.SERVER_METADATA, timeout_s)

    async def model_metadata(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> ModelMetadata:
        """Return the names, datatypes and shapes of a model's inputs and outputs."""
        return await self._run(management.model_metadata(model, version), timeout_s)

    async def is_live(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server runs."""
        return await self._run(management.LIVE, timeout_s)

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server is ready for requests."""
        return await self._run(management.READY, timeout_s)

    async def is_model_ready(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Return whether a model is ready; raise `NotFound` for a model that is not registered."""
        return await self._run(management.model_ready(model, version), timeout_s)

    async def statistics(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the request counts and durations of a model, one object per version, in Triton's format."""
        return await self._run(management.statistics(model, version), timeout_s)

    async def repository_index(
        self, *, ready_only: bool = False, timeout_s: float | None = None
    ) -> tuple[ModelState, ...]:
        """Return the models of the model repository with their states."""
        return await self._run(management.index(ready_only), timeout_s)

    async def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model of the repository and wait until it is ready."""
        await self._run(management.repository(model, "load"), timeout_s)

    async def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model."""
        await self._run(management.repository(model, "unload"), timeout_s)

    async def register(self, url: str, *, timeout_s: float | None = None, **options: object) -> str:
        """Register an archive of the model store. See `Client.register`."""
        return await self._run(management.register(url, **options), timeout_s)

    async def unregister(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> str:
        """Remove a version (None: the default version) after its requests are answered."""
        return await self._run(management.unregister(model, version), timeout_s)

    async def scale(
        self,
        model: str,
        min_workers: int,
        max_workers: int | None = None,
        *,
        version: str | None = None,
        synchronous: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Set the number of executors of a version, and wait for them unless `synchronous` is false."""
        operation = management.scale(model, min_workers, max_workers, version, synchronous)
        return await self._run(operation, timeout_s)

    async def set_default(self, model: str, version: str, *, timeout_s: float | None = None) -> str:
        """Make a version the default for requests that name no version."""
        return await self._run(management.set_default(model, version), timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelEntry]:
        """Return all models, sorted by name; request every page, each with its own time-out."""
        entries: list[ModelEntry] = []
        token: str | None = None
        while True:
            models, token = await self._run(management.list_page(token), timeout_s)
            entries += models
            if token is None or not models:
                return entries

    async def describe(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the full description of a version (None: the default version; "all": every version)."""
        return await self._run(management.describe(model, version), timeout_s)

    async def _run(self, operation: Operation[Result], timeout_s: float | None) -> Result:
        """Do as `Client._run`."""
        call = ClientCall(self._settings, operation, timeout_s)
        response = await self._accepted(call)
        return operation.read(answer_of(response, await _whole(call, response)))

    async def _stream(
        self, operation: Operation[object], timeout_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """Do as `Client._stream`."""
        call = ClientCall(self._settings, operation, timeout_s)
        async with aclosing(_parts(call, await self._accepted(call))) as parts:
            async for part in parts:  # closed together with this generator, not later by the event loop
                yield part

    async def _accepted(self, call: ClientCall) -> httpx.Response:
        while True:
            try:
                with call.translated():
                    response = await self._http.send(call.built(self._http), stream=True)
                if call.operation.takes(response.status_code):
                    return response
                raise refusal(answer_of(response, await _whole(call, response)))
            except ClientError as error:
                await asyncio.sleep(call.pause_s(error))


async def _parts(call: ClientCall, response: httpx.Response) -> AsyncGenerator[bytes, None]:
    with call.translated():
        async with aclosing(response):
            async for part in response.aiter_bytes():
                yield part
                call.check_deadline()


async def _whole(call: ClientCall, response: httpx.Response) -> bytes:
    return b"".join([part async for part in _parts(call, response)])
