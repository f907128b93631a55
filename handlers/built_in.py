"""Names of built-in handlers and envelopes, and the signatures of handlers that differ from the model's.

The server decides by these names; only a worker imports the classes behind them (`resolve.py`).
"""

from __future__ import annotations

from torchere.archiver.signature import ANY, Signature, TensorSpec

BUILT_IN_HANDLERS = {
    "base_handler": "torchere.handlers.base:BaseHandler",
    "densenet_handler": "torchere.handlers.densenet:DenseNetHandler",
    "image_classifier": "torchere.handlers.vision.tasks:ImageClassifier",
    "image_segmenter": "torchere.handlers.vision.tasks:ImageSegmenter",
    "object_detector": "torchere.handlers.vision.tasks:ObjectDetector",
    "sequence_classifier": "torchere.handlers.text.tasks:SequenceClassifier",
    "tensor": "torchere.handlers.tensor_handler:TensorHandler",
    "text_classifier": "torchere.handlers.text:TextClassifier",
    "text_embedding": "torchere.handlers.text.tasks:TextEmbedding",
    "voice_activity": "torchere.handlers.audio.voice_activity:VoiceActivity",
}
"""Names that need no file in the archive. All of them may run in threads on shared weights."""

CPP_HANDLERS = dict.fromkeys(
    ("BaseHandler", "TorchScriptHandler"), "torchere.handlers.densenet:TorchScriptHandler"
)
"""The same for archives of TorchServe's C++ backend, `runtime: LSP`."""
OF_TOOLKITS = {
    "sagemaker_pytorch_serving_container.handler_service": "torchere.handlers.sagemaker:SageMakerHandler"
}
"""Names of other servers' modules that manifests have; these handlers need a process of their own."""
HOMES = {**BUILT_IN_HANDLERS, **CPP_HANDLERS, **OF_TOOLKITS}
"""The class of each handler that needs no file, as `module:class`, by its name in manifests."""
CPP_ADVICE = (
    "expected a class in a shared library, such as libmy_handler:MyHandler in libmy_handler.so, or "
    "TorchScriptHandler"
)

ENVELOPES = {
    "body": "torchere.handlers.envelopes:BodyEnvelope",
    "json": "torchere.handlers.envelopes:JSONEnvelope",
    "kserve": "torchere.handlers.envelopes:KServeEnvelope",
    "kservev2": "torchere.handlers.envelopes:KServev2Envelope",
}

NOT_SHIPPED = {
    "dali_image_classifier": "it needs NVIDIA DALI",
    "text_handler": "it is a base class, not a handler",
    "trt_llm_handler": "it needs TensorRT-LLM",
    "vllm_handler": "it needs vLLM",
}
"""Names that TorchServe ships and we do not, and why."""

_OF_HANDLERS = {
    "sequence_classifier": Signature(
        (TensorSpec("text", "BYTES", (ANY,)),),
        (TensorSpec("scores", "FP32", (ANY, ANY)),),
    ),
    "text_embedding": Signature(
        (TensorSpec("text", "BYTES", (ANY,)),),
        (TensorSpec("embedding", "FP32", (ANY, ANY)),),
    ),
    "voice_activity": Signature(
        (TensorSpec("audio", "BYTES", (1,)),),
        (
            TensorSpec("start_s", "FP32", (ANY,)),
            TensorSpec("end_s", "FP32", (ANY,)),
            TensorSpec("duration_s", "FP32", (1,)),
        ),
    ),
}

READ_TENSORS = frozenset({"tensor", *_OF_HANDLERS})
"""Names of handlers that read the tensors of every protocol themselves, without an envelope."""


def request_signature(handler: str, of_model: Signature | None) -> Signature | None:
    """Return the tensors of the Open Inference Protocol for an archive; None when they are unknown.

    Args:
        handler: as in the manifest.
        of_model: the archive's `signature.json`, which describes the model behind the handler.
    """
    return _OF_HANDLERS.get(handler, of_model)
