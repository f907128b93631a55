"""The asyncio client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any

import httpx

from torchere.client import inference, management, predictions, repository
from torchere.client.awaiting import Awaiting
from torchere.client.client import INFERENCE_ADDRESS, MANAGEMENT_ADDRESS, TIMEOUT_S
from torchere.client.inference import InferOptions, InferResult, Inputs
from torchere.client.management import ModelEntry
from torchere.client.multipart import PartLike
from torchere.client.predictions import Prediction
from torchere.client.repository import ModelMetadata, ModelState, ServerMetadata
from torchere.client.retries import Retries
from torchere.client.wire import LIMITS, Settings


class AsyncClient:
    """The same as `Client`, to be awaited: see there for arguments, methods and errors.

    Use it on one event loop; any number of calls may run at once. Cancelling a call closes its connection,
    and the server drops the request.

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
        settings = Settings(
            address,
            management_address,
            token,
            management_token,
            timeout_s,
            retries or Retries(),
            headers or {},
        )
        self._transport = Awaiting(settings, httpx.AsyncClient(transport=transport, limits=LIMITS))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls that run break off."""
        await self._transport.close()

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
        """Ask a model by `/predictions`.

        Args:
            model: its name.
            data: `bytes` as they are, `str` as text, a path as its file, else as JSON, arrays as lists.
            version: None is the model's default one.
            content_type: instead of the one that belongs to `data`.
            files: a form of several parts, instead of `data`.
            headers: for the handler, in this spelling.
            timeout_s: for this call.

        Example:
            (await client.predict("net", {"x": [1, 2, 3]})).json()
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, files=files, headers=headers
        )
        return await self._transport.run(operation, timeout_s)

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
        """Ask a model that answers in parts; yields them as they come. See `predict`.

        The network may join parts that come close together. An answer that breaks off raises. Whoever stops
        before the end closes it (`contextlib.aclosing`): that drops the request.

        Example:
            async for part in client.predict_stream("llm", "Once upon a time"):
                print(part.decode(), end="")
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, headers=headers
        )
        return self._transport.stream(operation, timeout_s)

    async def explain(
        self, model: str, data: object = None, *, version: str | None = None, timeout_s: float | None = None
    ) -> Prediction:
        """Ask a model by `/explanations`. See `predict`."""
        operation = predictions.predict(model, data, version=version, verb="explanations")
        return await self._transport.run(operation, timeout_s)

    async def ping(self, *, timeout_s: float | None = None) -> bool:
        """TorchServe's `/ping`: whether every model has the executors it should have."""
        return await self._transport.run(management.healthy(), timeout_s)

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
        """Ask a model by the Open Inference Protocol: arrays in, arrays out.

        Args:
            model: its name.
            inputs: arrays by input name; `client.tensors.tensor` makes one of a datatype that NumPy lacks.
            options: binary or JSON, wanted outputs, parameters, id, sequence.
            version: None is the model's default one.
            headers: sent in addition.
            timeout_s: for this call.

        Example:
            (await client.infer("add", {"a": a, "b": b}))["sum"]
        """
        operation = inference.infer(
            model, inputs, options or InferOptions(), version=version, headers=headers
        )
        return await self._transport.run(operation, timeout_s)

    async def infer_stream(
        self,
        model: str,
        inputs: Inputs,
        options: InferOptions | None = None,
        *,
        version: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[InferResult, None]:
        """Ask a model that answers in parts by the Open Inference Protocol. See `infer`, `predict_stream`.

        Example:
            async for part in client.infer_stream("llm", {"prompt": ["Once upon a time"]}):
                print(part["text"][0].decode(), end="")
        """
        operation = inference.infer_stream(model, inputs, options or InferOptions(), version=version)
        events = inference.Events()
        async for part in self._transport.stream(operation, timeout_s):
            for result in events.feed(part):
                yield result
        events.end()

    async def server_metadata(self, *, timeout_s: float | None = None) -> ServerMetadata:
        """Which server answers, and what it can do."""
        return await self._transport.run(repository.server_metadata(), timeout_s)

    async def model_metadata(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> ModelMetadata:
        """Which tensors a model takes and gives."""
        return await self._transport.run(repository.model_metadata(model, version), timeout_s)

    async def is_live(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server runs."""
        return await self._transport.run(repository.live(), timeout_s)

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether traffic may come."""
        return await self._transport.run(repository.ready(), timeout_s)

    async def is_model_ready(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Whether a model can answer; `NotFound` is raised for one that nobody registered."""
        return await self._transport.run(repository.model_ready(model, version), timeout_s)

    async def statistics(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Counts and times of a model, one object a version, in Triton's form."""
        return await self._transport.run(repository.statistics(model, version), timeout_s)

    async def repository_index(
        self, *, ready_only: bool = False, timeout_s: float | None = None
    ) -> tuple[ModelState, ...]:
        """What is in the model repository, and how it is."""
        return await self._transport.run(repository.index(ready_only), timeout_s)

    async def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model of the repository, and wait until it is ready."""
        await self._transport.run(repository.load(model), timeout_s)

    async def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model."""
        await self._transport.run(repository.unload(model), timeout_s)

    async def register(self, url: str, *, timeout_s: float | None = None, **options: object) -> str:
        """Register an archive of the model store; returns the server's sentence.

        Args:
            url: the archive's file name.
            timeout_s: for this call.
            options: parameters of the management API: `model_name`, `initial_workers`, `batch_size`,
                `max_batch_delay`, `synchronous`, `response_timeout`, `startup_timeout`, `handler`, `runtime`.

        Example:
            await client.register("net.mar", initial_workers=1)
        """
        return await self._transport.run(management.register(url, **options), timeout_s)

    async def unregister(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> str:
        """Remove a version (None: the default one) after its requests are answered."""
        return await self._transport.run(management.unregister(model, version), timeout_s)

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
        """Change how many executors a version has; waits for them unless `synchronous` is false."""
        operation = management.scale(model, min_workers, max_workers, version, synchronous)
        return await self._transport.run(operation, timeout_s)

    async def set_default(self, model: str, version: str, *, timeout_s: float | None = None) -> str:
        """Make a version the one that requests without a version get."""
        return await self._transport.run(management.set_default(model, version), timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelEntry]:
        """All models by name; asks for as many pages as there are, each with the time-out of its own."""
        entries: list[ModelEntry] = []
        token: str | None = None
        while True:
            page = await self._transport.run(management.list_page(token), timeout_s)
            entries += page.models
            token = page.next_token
            if token is None or not page.models:
                return entries

    async def describe(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Everything about a version (None: the default one; "all": each of them)."""
        return await self._transport.run(management.describe(model, version), timeout_s)
