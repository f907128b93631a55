"""The synchronous client."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any

import httpx

from torchere.client import inference, management, predictions, repository
from torchere.client.blocking import Blocking
from torchere.client.inference import InferOptions, InferResult, Inputs
from torchere.client.management import ModelEntry
from torchere.client.multipart import PartLike
from torchere.client.predictions import Prediction
from torchere.client.repository import ModelMetadata, ModelState, ServerMetadata
from torchere.client.retries import Retries
from torchere.client.wire import LIMITS, Settings

INFERENCE_ADDRESS = "http://127.0.0.1:8080"
MANAGEMENT_ADDRESS = "http://127.0.0.1:8081"
TIMEOUT_S = 60.0


class Client:
    """Calls a server's REST APIs: predictions, the Open Inference Protocol (v2), management.

    Thread-safe. Close it, or use it in a `with` statement, to close its connections. Every method raises a
    `ClientError`: `AnswerError` with what the server said, `DeadlineExceeded`, `ConnectionFailed` or
    `UnreadableAnswer`; and takes `timeout_s`, the seconds for the whole call with all its attempts, which
    the server is told, so that it does not work on what nobody waits for. A server that falls silent within
    an answer may be waited for as long again, since a time-out of httpx is that of one read; one that keeps
    sending bits of a head is not given up while they come.

    Args:
        address: of the inference API.
        management_address: of the management API, the model repository's too.
        token: the inference key of a server with token authorisation.
        management_token: its management key.
        timeout_s: for calls that name none; None waits for ever.
        retries: when a call is sent again.
        headers: sent with every call; those of a call come before them.
        transport: httpx's, for certificates, Unix sockets, proxies or tests; None is its usual one.

    Example:
        with Client(token=key) as client:
            print(client.predict("net", Path("cat.jpg")).json())
            result = client.infer("mlp", {"input": numpy.zeros((1, 64), "float32")})
            print(result["output"])
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
        transport: httpx.BaseTransport | None = None,
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
        self._transport = Blocking(settings, httpx.Client(transport=transport, limits=LIMITS))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls that run break off."""
        self._transport.close()

    def predict(
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
            client.predict("net", {"x": [1, 2, 3]}).json()
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, files=files, headers=headers
        )
        return self._transport.run(operation, timeout_s)

    def predict_stream(
        self,
        model: str,
        data: object = None,
        *,
        version: str | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Generator[bytes, None, None]:
        """Ask a model that answers in parts; yields them as they come. See `predict`.

        The network may join parts that come close together. An answer that breaks off raises. Whoever stops
        before the end closes it (`contextlib.closing`): that drops the request.

        Example:
            for part in client.predict_stream("llm", "Once upon a time"):
                print(part.decode(), end="")
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, headers=headers
        )
        return self._transport.stream(operation, timeout_s)

    def explain(
        self, model: str, data: object = None, *, version: str | None = None, timeout_s: float | None = None
    ) -> Prediction:
        """Ask a model by `/explanations`. See `predict`."""
        operation = predictions.predict(model, data, version=version, verb="explanations")
        return self._transport.run(operation, timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> bool:
        """TorchServe's `/ping`: whether every model has the executors it should have."""
        return self._transport.run(management.healthy(), timeout_s)

    def infer(
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
            client.infer("add", {"a": a, "b": b}, InferOptions(outputs=["sum"]))["sum"]
        """
        operation = inference.infer(
            model, inputs, options or InferOptions(), version=version, headers=headers
        )
        return self._transport.run(operation, timeout_s)

    def infer_stream(
        self,
        model: str,
        inputs: Inputs,
        options: InferOptions | None = None,
        *,
        version: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[InferResult, None, None]:
        """Ask a model that answers in parts by the Open Inference Protocol. See `infer`, `predict_stream`.

        Example:
            for part in client.infer_stream("llm", {"prompt": ["Once upon a time"]}):
                print(part["text"][0].decode(), end="")
        """
        operation = inference.infer_stream(model, inputs, options or InferOptions(), version=version)
        events = inference.Events()
        for part in self._transport.stream(operation, timeout_s):
            yield from events.feed(part)
        events.end()

    def server_metadata(self, *, timeout_s: float | None = None) -> ServerMetadata:
        """Which server answers, and what it can do."""
        return self._transport.run(repository.server_metadata(), timeout_s)

    def model_metadata(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> ModelMetadata:
        """Which tensors a model takes and gives."""
        return self._transport.run(repository.model_metadata(model, version), timeout_s)

    def is_live(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server runs."""
        return self._transport.run(repository.live(), timeout_s)

    def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether traffic may come."""
        return self._transport.run(repository.ready(), timeout_s)

    def is_model_ready(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Whether a model can answer; `NotFound` is raised for one that nobody registered."""
        return self._transport.run(repository.model_ready(model, version), timeout_s)

    def statistics(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Counts and times of a model, one object a version, in Triton's form."""
        return self._transport.run(repository.statistics(model, version), timeout_s)

    def repository_index(
        self, *, ready_only: bool = False, timeout_s: float | None = None
    ) -> tuple[ModelState, ...]:
        """What is in the model repository, and how it is."""
        return self._transport.run(repository.index(ready_only), timeout_s)

    def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model of the repository, and wait until it is ready."""
        self._transport.run(repository.load(model), timeout_s)

    def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model."""
        self._transport.run(repository.unload(model), timeout_s)

    def register(self, url: str, *, timeout_s: float | None = None, **options: object) -> str:
        """Register an archive of the model store; returns the server's sentence.

        Args:
            url: the archive's file name.
            timeout_s: for this call.
            options: parameters of the management API: `model_name`, `initial_workers`, `batch_size`,
                `max_batch_delay`, `synchronous`, `response_timeout`, `startup_timeout`, `handler`, `runtime`.

        Example:
            client.register("net.mar", initial_workers=1)
        """
        return self._transport.run(management.register(url, **options), timeout_s)

    def unregister(self, model: str, version: str | None = None, *, timeout_s: float | None = None) -> str:
        """Remove a version (None: the default one) after its requests are answered."""
        return self._transport.run(management.unregister(model, version), timeout_s)

    def scale(
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
        return self._transport.run(operation, timeout_s)

    def set_default(self, model: str, version: str, *, timeout_s: float | None = None) -> str:
        """Make a version the one that requests without a version get."""
        return self._transport.run(management.set_default(model, version), timeout_s)

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelEntry]:
        """All models by name; asks for as many pages as there are, each with the time-out of its own."""
        entries: list[ModelEntry] = []
        token: str | None = None
        while True:
            page = self._transport.run(management.list_page(token), timeout_s)
            entries += page.models
            token = page.next_token
            if token is None or not page.models:
                return entries

    def describe(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Everything about a version (None: the default one; "all": each of them)."""
        return self._transport.run(management.describe(model, version), timeout_s)
