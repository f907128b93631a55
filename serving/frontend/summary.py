"""The summary that start-up prints: the models, the addresses, and a command to paste for each model."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver.signature import Signature, TensorSpec, smallest_shapes
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.model_facts import TENSOR_HANDLER, ModelFacts
from torchere.serving.registry.version import Version
from torchere.serving.types import ModelKey

_DEFAULT = Address("127.0.0.1", 8080)
_MOST_NUMBERS = 32  # in a line to paste
_MOST_CHARACTERS = 500  # of an example in a line to paste
_UNKNOWN = "YOUR_REQUEST_FILE"  # placeholder, if the input of a model is unknown
# Handlers that take a file -> the option of `torchere predict`, and a placeholder for the file's name.
_FILES = dict.fromkeys(("image_classifier", "image_segmenter", "object_detector"), ("--image", "PICTURE.jpg"))
_FILES["voice_activity"] = ("--file", "SOUND.wav")
_TEXTS = ("sequence_classifier", "text_classifier", "text_embedding")
Paint = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Caller:
    """How clients on this machine call the server.

    `command` runs `torchere`; None if `torchere predict` can't run here (httpx is missing).
    """

    command: str | None
    address: Address  # of inference, as it was bound
    settings: ServerSettings

    def line(self, facts: ModelFacts) -> str:
        """Return a command that sends a valid request to the model, as far as its input is known."""
        name = facts.key.name if len(facts.versions) == 1 else f"{facts.key.name}/{facts.key.version}"
        if self.command is None or self.address.unix_path is not None:
            return self._curl(name, facts)
        return " ".join([*self._environment(), self.command, "predict", name, *_body(facts), *self._server()])

    def _environment(self) -> list[str]:
        settings, words = self.settings, []
        if settings.token_auth_enabled and settings.token_keys_file is not None:
            words.append("TORCHERE_TOKEN=KEY")
        if self.address.tls and settings.certificate_file is not None:
            words.append(f"SSL_CERT_FILE={shlex.quote(str(settings.certificate_file))}")
        return words

    def _server(self) -> list[str]:
        address, settings, words = _reachable(self.address), self.settings, []
        if address != _DEFAULT:
            words += ["--address", str(address)]
        is_elsewhere = settings.key_file.absolute() != Path("key_file.json").absolute()
        if settings.token_auth_enabled and settings.token_keys_file is None and is_elsewhere:
            words += ["--token-file", shlex.quote(str(settings.key_file))]
        return words

    def _curl(self, name: str, facts: ModelFacts) -> str:
        settings, words = self.settings, ["curl"]
        if settings.token_auth_enabled:
            file = shlex.quote(str(settings.key_file))
            key = f"$(jq -r .inference.key {file})" if settings.token_keys_file is None else "KEY"
            words.append(f'-H "Authorization: Bearer {key}"')
        if self.address.tls and settings.certificate_file is not None:
            words.append(f"--cacert {shlex.quote(str(settings.certificate_file))}")
        base = str(_reachable(self.address))
        if self.address.unix_path is not None:
            words.append(f"--unix-socket {shlex.quote(self.address.unix_path)}")
            base = "http://localhost"
        path, body = _curl_body(name, facts)
        return " ".join([*words, *body, f"{base}{path}"])


def _reachable(address: Address) -> Address:
    """Return an address that a client on this machine can connect to."""
    any_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return Address(any_host.get(address.host, address.host), address.port, tls=address.tls)


def _body(facts: ModelFacts) -> list[str]:
    """Return the options of `torchere predict` that give the model an input."""
    if facts.handler in _FILES:
        return [*_FILES[facts.handler]]
    if facts.handler in _TEXTS:
        return ["--text", "'A sentence.'"]
    signature = _tensors(facts)
    if signature is None:
        example = _example(facts)
        return ["--json", shlex.quote(example)] if example else ["--file", _UNKNOWN]
    return _tensor_body(signature)


def _tensor_body(signature: Signature) -> list[str]:
    inputs = list(zip(signature.inputs, smallest_shapes(signature.inputs), strict=True))
    if sum(math.prod(shape) for _, shape in inputs) > _MOST_NUMBERS:
        if any(_plain_value(spec) for spec, _ in inputs):  # zeros are not valid
            return ["--file", _UNKNOWN]
        return [
            word
            for spec, shape in inputs
            for word in ("--zeros", shlex.quote(f"{spec.name}={'x'.join(map(str, shape))}"))
        ]
    values = {spec.name: _nested(_plain_value(spec), shape) for spec, shape in inputs}
    return ["--v2", "--json", shlex.quote(json.dumps(values))]


def _plain_value(spec: TensorSpec) -> object:
    """Return a valid value of the input: 0, or the valid number nearest to it; a word for BYTES."""
    if spec.datatype == "BYTES":
        return "text"
    if spec.datatype == "BOOL":
        return False
    if spec.datatype.startswith(("F", "BF")):
        return 0.0
    return 0 if spec.values is None else min(max(0, spec.values.least), spec.values.most)


def _curl_body(name: str, facts: ModelFacts) -> tuple[str, list[str]]:
    """Return the path and the options of curl that give the model an input."""
    path = f"/predictions/{name}"
    if facts.handler in _FILES:
        return path, ["-T", _FILES[facts.handler][1]]
    if facts.handler in _TEXTS:
        return path, ["-d", "'A sentence.'", "-H 'Content-Type: text/plain'"]
    signature = _tensors(facts)
    if signature is None:
        example = _example(facts)
        return path, ["--json", shlex.quote(example)] if example else ["-T", _UNKNOWN]
    model = f"/v2/models/{name.replace('/', '/versions/')}"
    shapes = smallest_shapes(signature.inputs)
    if sum(map(math.prod, shapes)) > _MOST_NUMBERS:
        return model, []  # shows the model's inputs
    inputs = [
        {"name": spec.name, "shape": shape, "datatype": spec.datatype}
        | {"data": [_plain_value(spec)] * math.prod(shape)}
        for spec, shape in zip(signature.inputs, shapes, strict=True)
    ]
    return f"{model}/infer", ["--json", shlex.quote(json.dumps({"inputs": inputs}))]


def is_declared(facts: ModelFacts) -> bool:
    """Whether the input of the model is known: by its handler, its signature, or its model config."""
    by_handler = facts.handler in (*_FILES, *_TEXTS)
    return by_handler or _tensors(facts) is not None or bool(_example(facts))


def _example(facts: ModelFacts) -> str:
    """Return the example of the model config as JSON; "" without an example, or with one that is too long."""
    try:
        text = "" if facts.example is None else json.dumps(facts.example)
    except (TypeError, ValueError, RecursionError):  # YAML has dates, and keys that JSON does not allow
        return ""
    return text if len(text) <= _MOST_CHARACTERS else ""


def _tensors(facts: ModelFacts) -> Signature | None:
    """Return the tensors that requests may hold; None if the handler reads other or unknown input."""
    return facts.signature if facts.handler == TENSOR_HANDLER else None


def _nested(value: object, shape: Sequence[int]) -> object:
    for size in reversed(shape):
        value = [value] * size
    return value


@dataclass(frozen=True, slots=True)
class StartedModel:
    """A model loaded at start-up: its name and workers, and whether it works."""

    name: str
    workers: str  # their number and isolation
    line: str  # the command to paste; "": the model does not work
    failure: str = ""


def started_models(
    versions: Sequence[Version],
    missing: Sequence[str],
    facts: Callable[[ModelKey], ModelFacts],
    caller: Caller,
) -> list[StartedModel]:
    """Return the models loaded at start-up, except steps of workflows; call it when all have settled.

    `missing` are names of models that could not be registered.
    """
    models = []
    for version in versions:
        if version.origin.workflow:
            continue
        key, count, works = version.key, version.pool.in_service, version.ready
        noun = "worker" if count == 1 else "workers"
        about = f"{count} {noun} ({version.origin.isolation})"
        if works and not is_declared(facts(key)):
            about += f"; its input is not declared: {_UNKNOWN} stands for a file with a request"
        line = caller.line(facts(key)) if works else ""
        failure = "" if works else version.failure_text or "it has no worker: scale it up"
        models.append(StartedModel(f"{key.name} {key.version}", about, line, failure))
    return [*models, *(StartedModel(name, "", "", "not registered: see above") for name in missing)]


def summary(
    models: Sequence[StartedModel],
    addresses: Mapping[str, tuple[str, str]],
    keys: str,
    warnings: int,
    paint: Paint,
) -> list[str]:
    """Return the lines of a summary.

    Args:
        models: in the order of the lines.
        addresses: by API, the address of REST and that of gRPC ("" if there is none).
        keys: says where the keys are, or that there are none.
        warnings: the number of warnings that were logged.
        paint: colors a text.
    """
    lines = [""]
    for api, (rest, grpc) in addresses.items():
        lines.append(f"  {api:<12}{rest}{f'  gRPC {grpc}' if grpc else ''}")
    lines.append(f"  {'keys':<12}{keys}")
    if warnings:
        noun = "warning" if warnings == 1 else "warnings"
        lines.append(f"  {'warnings':<12}{paint(f'{warnings} {noun} above', 'yellow')}")
    lines.append("")
    for model in models:
        if model.line:
            lines.append(f"  {paint('ready', 'green')}   {model.name}  {paint(model.workers, 'dim')}")
            lines.append(f"          {paint(model.line, 'bold')}")
        else:
            lines.append(f"  {paint('failed', 'red')}  {model.name}  {model.failure}")
    ready = sum(1 for model in models if model.line)
    lines.append(f"  {ready} of {len(models)} models ready. Ctrl+C stops the server.")
    return [*lines, ""]
