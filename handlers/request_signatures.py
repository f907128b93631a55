"""Request signatures of built-in handlers whose inputs differ from the model's own tensors."""

from __future__ import annotations

from torchere.archiver.signature import ANY, Signature, TensorSpec

_OF_HANDLERS = {
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


def request_signature(handler: str, of_model: Signature | None) -> Signature | None:
    """Return the tensors of the Open Inference Protocol for an archive; None when they are unknown.

    Args:
        handler: as in the manifest.
        of_model: the archive's `signature.json`, which describes the model behind the handler.
    """
    return _OF_HANDLERS.get(handler, of_model)
