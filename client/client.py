"""The synchronous client."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import httpx

from torchere.client import inference, management, predictions
from torchere.client.errors import ClientError
from torchere.client.exchange import Api, Operation, Result, refusal
from torchere.client.inference import InferOptions, InferResult, Inputs
from torchere.client.management import ModelEntry, ModelMetadata, ModelState, ServerMetadata
from torchere.client.predictions import PartLike, Prediction
from torchere.client.transport import ClientCall, Retries, Settings, answer_of

INFERENCE_ADDRESS = "http://127.0.0.1:8080"
MANAGEMENT_ADDRESS = "http://127.0.0.1:8081"
TIMEOUT_S = 60.0


class Client:
    """Calls a server's REST APIs: predictions, the Open Inference Protocol (v2), management.

    Thread-safe. A forked process may use it, too, and opens connections of its own; with a `transport` only
    if it was not used before the fork. Close it, or use it in a `with` statement, to close its connections.
    A call that fails raises a subclass of `ClientError`: `AnswerError` with the server's error message,
    `DeadlineExceeded`, `ConnectionFailed` or `UnreadableAnswer`. It raises `ClientError` itself if the client
    is closed, if HTTP can't carry a header, or if the key file is unusable.

    Every method takes `timeout_s`, the deadline of the whole call in seconds, all attempts included. The
    client sends the remaining time to the inference API, so that the server can drop an expired request. A
    call can last up to twice as long if the server stops sending in the middle of a response, because an
    httpx time-out applies to a single read. A server that keeps sending pieces of a response head is not
    timed out.

    Args:
        address: the URL of the inference API.
        management_address: the URL of the management API, which also serves the model repository.
        token: the inference key of a server with token authorisation; "": send none. None: the first call
            looks it up in the environment variable TORCHERE_TOKEN, or for a server on this machine in
            `key_file.json` in the current folder.
        management_token: the management key, likewise; its environment variable: TORCHERE_MANAGEMENT_TOKEN.
        timeout_s: the default for calls without a `timeout_s`; None waits without limit.
        retries: the retry policy.
        headers: sent with every call; the headers of a single call take precedence.
        transport: an httpx transport, for certificates, Unix sockets, proxies or tests; None is the default,
            which uses the proxy of the environment (`HTTP_PROXY`), except for a server on this machine.

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
        addresses: dict[Api, str] = {"inference": address, "management": management_address}
        tokens: dict[Api, str | None] = {"inference": token, "management": management_token}
        self._settings = Settings(addresses, tokens, timeout_s, retries, headers)
        self._given = transport
        self._http = self._made()
        self._pid: int | None = None  # the process that has sent something with `_http`

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; running calls fail."""
        self._http.close()

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
        """Send a request to `/predictions` and return the response.

        Args:
            model: the name of the model.
            data: `bytes` are sent unchanged, `str` as text, a path as the content of its file, any other
                value as JSON with arrays as lists.
            version: None is the default version of the model.
            content_type: overrides the content type derived from `data`.
            files: the parts of a multipart form, sent instead of `data`.
            headers: for the handler; their spelling is kept.
            timeout_s: the deadline of this call.

        Example:
            client.predict("net", {"x": [1, 2, 3]}).json()
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, files=files, headers=headers
        )
        return self._run(operation, timeout_s)

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
        """Send a request to `/predictions` and yield the parts of the streamed response. See `predict`.

        The network may merge parts that are sent close together. If the response is cut off, an error is
        raised. To stop early, close the generator (`contextlib.closing`): this cancels the request.

        Example:
            for part in client.predict_stream("llm", "Once upon a time"):
                print(part.decode(), end="")
        """
        operation = predictions.predict(
            model, data, version=version, content_type=content_type, headers=headers
        )
        return self._stream(operation, timeout_s)

    def explain(
        self, model: str, data: object = None, *, version: str | None = None, timeout_s: float | None = None
    ) -> Prediction:
        """Send a request to `/explanations` and return the response. See `predict`."""
        operation = predictions.predict(model, data, version=version, verb="explanations")
        return self._run(operation, timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> bool:
        """Return whether every model has the executors it should have (TorchServe's `/ping`)."""
        return self._run(management.HEALTHY, timeout_s)

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
        """Run a model by the Open Inference Protocol, with arrays as inputs and outputs.

        Args:
            model: the name of the model.
            inputs: arrays by input name; `client.tensors.tensor` makes a tensor of a datatype that NumPy
                lacks.
            options: binary or JSON encoding, requested outputs, parameters, id, sequence.
            version: None is the default version of the model.
            headers: sent in addition.
            timeout_s: the deadline of this call.

        Example:
            client.infer("add", {"a": a, "b": b}, InferOptions(outputs=["sum"]))["sum"]
        """
        operation = inference.infer(model, inputs, options, version=version, headers=headers)
        return self._run(operation, timeout_s)

    def infer_stream(
        self,
        model: str,
        inputs: Inputs,
        options: InferOptions | None = None,
        *,
        version: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[InferResult, None, None]:
        """Run a model by the Open Inference Protocol and yield streamed results.

        See `infer` and `predict_stream`.

        Example:
            for part in client.infer_stream("llm", {"prompt": ["Once upon a time"]}):
                print(part["text"][0].decode(), end="")
        """
        operation = inference.infer_stream(model, inputs, options, version=version)
        events = inference.Events()
        for part in self._stream(operation, timeout_s):
            yield from events.feed(part)
        events.end()

    def server_metadata(self, *, timeout_s: float | None = None) -> ServerMetadata:
        """Return the server's name, version and protocol extensions."""
        return self._run(management.SERVER_METADATA, timeout_s)

    def model_metadata(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> ModelMetadata:
        """Return the names, datatypes and shapes of a model's inputs and outputs."""
        return self._run(management.model_metadata(model, version), timeout_s)

    def is_live(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server runs."""
        return self._run(management.LIVE, timeout_s)

    def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server is ready for requests."""
        return self._run(management.READY, timeout_s)

    def is_model_ready(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Return whether a model is ready; raise `NotFound` for a model that is not registered."""
        return self._run(management.model_ready(model, version), timeout_s)

    def statistics(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the request counts and durations of a model, one object per version, in Triton's format."""
        return self._run(management.statistics(model, version), timeout_s)

    def repository_index(
        self, *, ready_only: bool = False, timeout_s: float | None = None
    ) -> tuple[ModelState, ...]:
        """Return the models of the model repository with their states."""
        return self._run(management.index(ready_only), timeout_s)

    def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model of the repository and wait until it is ready."""
        self._run(management.repository(model, "load"), timeout_s)

    def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model."""
        self._run(management.repository(model, "unload"), timeout_s)

    def register(self, url: str, *, timeout_s: float | None = None, **options: object) -> str:
        """Register an archive of the model store and return the server's status message.

        Args:
            url: the file name of the archive.
            timeout_s: the deadline of this call.
            options: parameters of the management API: `model_name`, `initial_workers`, `batch_size`,
                `max_batch_delay`, `synchronous`, `response_timeout`, `startup_timeout`, `handler`, `runtime`.

        Example:
            client.register("net.mar", initial_workers=1)
        """
        return self._run(management.register(url, **options), timeout_s)

    def unregister(self, model: str, version: str | None = None, *, timeout_s: float | None = None) -> str:
        """Remove a version (None: the default version) after its requests are answered."""
        return self._run(management.unregister(model, version), timeout_s)

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
        """Set the number of executors of a version, and wait for them unless `synchronous` is false."""
        operation = management.scale(model, min_workers, max_workers, version, synchronous)
        return self._run(operation, timeout_s)

    def set_default(self, model: str, version: str, *, timeout_s: float | None = None) -> str:
        """Make a version the default for requests that name no version."""
        return self._run(management.set_default(model, version), timeout_s)

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelEntry]:
        """Return all models, sorted by name; request every page, each with its own time-out."""
        entries: list[ModelEntry] = []
        token: str | None = None
        while True:
            models, token = self._run(management.list_page(token), timeout_s)
            entries += models
            if token is None or not models:
                return entries

    def describe(
        self, model: str, version: str | None = None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the full description of a version (None: the default version; "all": every version)."""
        return self._run(management.describe(model, version), timeout_s)

    def _made(self) -> httpx.Client:
        return self._settings.http(httpx.Client, self._given, httpx.HTTPTransport)

    def _http_here(self) -> httpx.Client:
        """Return the httpx client of this process; the parent's is not closed, as the parent may use it.

        On shared sockets, parent and child could read each other's answers.

        Raises:
            ClientError: the client has the caller's own transport, which can't be made again.
        """
        pid = os.getpid()
        if self._pid is not None and self._pid != pid:
            if self._given is not None:
                raise ClientError(
                    "the client's transport was used before a fork; make a client in each process"
                )
            self._http = self._made()
        self._pid = pid  # set last: another thread either uses the new client or makes one more
        return self._http

    def _run(self, operation: Operation[Result], timeout_s: float | None) -> Result:
        """Send an operation, retry it as `Retries` allows within its deadline, and return its result.

        Raises:
            ClientError: the error of the last attempt.
        """
        call = ClientCall(self._settings, operation, timeout_s)
        response = self._accepted(call)
        return operation.read(answer_of(response, b"".join(_parts(call, response))))

    def _stream(self, operation: Operation[object], timeout_s: float | None) -> Generator[bytes, None, None]:
        """Yield the parts of a response as they arrive; retry only before the first part."""
        call = ClientCall(self._settings, operation, timeout_s)
        yield from _parts(call, self._accepted(call))

    def _accepted(self, call: ClientCall) -> httpx.Response:
        """Send the request, with retries, until a response has a status that the operation takes."""
        while True:
            try:
                with call.translated():
                    http = self._http_here()
                    response = http.send(call.built(http), stream=True)
                if call.operation.takes(response.status_code):
                    return response
                raise refusal(answer_of(response, b"".join(_parts(call, response))))
            except ClientError as error:
                time.sleep(call.pause_s(error))


def _parts(call: ClientCall, response: httpx.Response) -> Iterator[bytes]:
    # The time-out of httpx applies to each read, not to their sum: a server that sends one byte a second
    # would never exceed it.
    with call.translated(), closing(response):
        for part in response.iter_bytes():
            yield part
            call.check_deadline()
