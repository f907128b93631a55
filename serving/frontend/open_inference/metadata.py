"""What the protocol tells of a server and its models, in the members of its JSON and its messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.telemetry.statistics import BatchSizeStatistics, Spent, VersionStatistics

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
    """Of the server. The misspelt key is TorchServe's, and clients may read it, beside the right one."""
    return {
        "name": "Torchserve",
        "version": CONTRACT_VERSION,
        "extenstion": _CONTRACT_EXTENSIONS,
        "extensions": EXTENSIONS,
    }


def model_metadata(facts: ModelFacts) -> Members:
    """Of a model; without a signature nothing is known of its tensors, and the lists are empty."""
    signature = facts.signature or Signature((), ())
    return {
        "name": facts.key.name,
        "versions": list(facts.versions),
        "platform": facts.platform,
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
    }


def model_config(facts: ModelFacts) -> Members:
    """Triton's model configuration, as far as there is something to say.

    `max_batch_size` above 0 tells Triton's clients that shapes begin with the batch dimension; its dims are
    without it.
    """
    signature = facts.signature or Signature((), ())
    batched = bool(signature.inputs) and signature.batched
    return {
        "name": facts.key.name,
        "platform": facts.platform,
        "backend": "pytorch",
        "max_batch_size": facts.max_batch_size if batched else 0,
        "input": [_configured(spec, batched) for spec in signature.inputs],
        "output": [_configured(spec, batched) for spec in signature.outputs],
    }


def model_statistics(all_facts: Iterable[ModelFacts]) -> Members:
    """Triton's statistics: counts, and times in nanoseconds.

    `compute_infer` is the time in the handler; what the executor adds around it (hand-over, decoding,
    encoding) counts as `compute_output`, and nothing as `compute_input`.
    """
    return {"model_stats": [_statistics(facts, facts.statistics) for facts in all_facts]}


def _statistics(facts: ModelFacts, statistics: VersionStatistics) -> Members:
    count = statistics.success.count
    return {
        "name": facts.key.name,
        "version": facts.key.version,
        "last_inference": statistics.last_ms,
        "inference_count": count,
        "execution_count": statistics.executions,
        "inference_stats": {
            "success": _spent(statistics.success),
            "fail": _spent(statistics.fail),
            "queue": _spent(statistics.queue),
            "compute_input": _spent(Spent(statistics.handler.count)),
            "compute_infer": _spent(statistics.handler),
            "compute_output": _spent(statistics.around),
            "cache_hit": _spent(Spent()),
            "cache_miss": _spent(Spent()),
        },
        "batch_stats": [_batches(size, of_size) for size, of_size in sorted(statistics.batches.items())],
    }


def _batches(size: int, batches: BatchSizeStatistics) -> Members:
    return {
        "batch_size": size,
        "compute_input": _spent(Spent(batches.handler.count)),
        "compute_infer": _spent(batches.handler),
        "compute_output": _spent(batches.around),
    }


def _spent(spent: Spent) -> Members:
    return {"count": spent.count, "ns": spent.ns}


def _tensor(spec: TensorSpec) -> Members:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _configured(spec: TensorSpec, batched: bool) -> Members:
    data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {
        "name": spec.name,
        "data_type": data_type,
        "dims": list(spec.shape[1:] if batched else spec.shape),
    }
