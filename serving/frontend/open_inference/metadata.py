"""Metadata, configuration and statistics of the protocol as plain members, for REST and gRPC. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchere.archiver.signature import Signature, TensorSpec, smallest_shapes
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.telemetry.numbers import BatchSize, VersionNumbers
from torchere.serving.types import ModelKey

Members = dict[str, Any]

CONTRACT_VERSION = "0.12.0"
_CONTRACT_EXTENSIONS = ["kserve", "kubeflow"]
EXTENSIONS = [
    *_CONTRACT_EXTENSIONS,
    "binary_tensor_data",
    "classification",
    "generate",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "sequence",
    "statistics",
]


def server_metadata() -> Members:
    """Return the server metadata. It repeats TorchServe's misspelt key, which clients may read."""
    return {
        "name": "Torchserve",
        "version": CONTRACT_VERSION,
        "extenstion": _CONTRACT_EXTENSIONS,
        "extensions": EXTENSIONS,
    }


def model_metadata(facts: ModelFacts) -> Members:
    """Return the metadata of a model. Without a signature the lists of tensors are empty.

    Inputs that do not take every size or number have `parameters`, for which gRPC's messages have no field.
    """
    signature = facts.signature or Signature((), ())
    smallest = smallest_shapes(signature.inputs)
    return {
        "name": facts.key.name,
        "versions": list(facts.versions),
        "platform": facts.platform,
        "inputs": [
            _tensor(spec) | _limited(spec, shape)
            for spec, shape in zip(signature.inputs, smallest, strict=True)
        ],
        "outputs": [_tensor(spec) for spec in signature.outputs],
    }


def model_config(facts: ModelFacts) -> Members:
    """Return Triton's model configuration, limited to the members that apply here.

    `max_batch_size` above 0 tells Triton's clients that shapes begin with the batch dimension, which `dims`
    leaves out.
    """
    signature = facts.signature or Signature((), ())
    batched = bool(signature.inputs) and signature.batched
    return {
        "name": facts.key.name,
        "platform": facts.platform,
        "backend": "pytorch",
        "max_batch_size": facts.max_batch_size if batched else 0,
        # Clients of Triton read the format; over gRPC its default is the same.
        "input": [_configured(spec, batched) | {"format": "FORMAT_NONE"} for spec in signature.inputs],
        "output": [_configured(spec, batched) for spec in signature.outputs],
    }


def model_statistics(all_facts: Iterable[ModelFacts]) -> Members:
    """Return Triton's statistics: counts, and times in nanoseconds.

    `compute_infer` is the time in the handler. The overhead of the executor around it (hand-over, decoding,
    encoding) counts as `compute_output`; `compute_input` is always 0.
    """
    return {"model_stats": [_statistics(facts.key, facts.numbers) for facts in all_facts]}


def _statistics(key: ModelKey, numbers: VersionNumbers) -> Members:
    succeeded = numbers.requests_succeeded
    return {
        "name": key.name,
        "version": key.version,
        "last_inference": int(numbers.last_batch_s * 1000),
        "inference_count": succeeded,
        "execution_count": numbers.batches,
        "inference_stats": {
            "success": _spent(succeeded, numbers.succeeded_s),
            "fail": _spent(numbers.requests_failed, numbers.failed_s),
            "queue": _spent(succeeded + numbers.requests_failed, numbers.queue_s),
            "compute_input": _spent(succeeded, 0.0),
            "compute_infer": _spent(succeeded, numbers.handler_s),
            "compute_output": _spent(succeeded, numbers.around_s),
            "cache_hit": _spent(0, 0.0),
            "cache_miss": _spent(0, 0.0),
        },
        "batch_stats": [
            _batches(size, of_size) for size, of_size in sorted(numbers.by_size.items()) if of_size.batches
        ],
    }


def _batches(size: int, of_size: BatchSize) -> Members:
    return {
        "batch_size": size,
        "compute_input": _spent(of_size.batches, 0.0),
        "compute_infer": _spent(of_size.batches, of_size.handler_s),
        "compute_output": _spent(of_size.batches, of_size.around_s),
    }


def _spent(count: int, seconds: float) -> Members:
    return {"count": count, "ns": round(seconds * 1e9)}


def _tensor(spec: TensorSpec) -> Members:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _limited(spec: TensorSpec, smallest: Sequence[int]) -> Members:
    """Return the member `parameters`: numbers and texts, as the protocol wants them; {} without limits."""
    found: Members = {}
    for limit in spec.limits:
        about = {
            "least": smallest[limit.dimension],
            "most": limit.most,
            "multiple": limit.multiple if limit.multiple > 1 else None,
            "name": limit.name or None,
        }
        found |= {f"dimension_{limit.dimension}_{key}": value for key, value in about.items() if value}
    if spec.values is not None:
        found |= {"values_least": spec.values.least, "values_most": spec.values.most}
    return {"parameters": found} if found else {}


def _configured(spec: TensorSpec, batched: bool) -> Members:
    data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {
        "name": spec.name,
        "data_type": data_type,
        "dims": list(spec.shape[1:] if batched else spec.shape),
    }
