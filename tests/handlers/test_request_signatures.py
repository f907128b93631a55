from __future__ import annotations

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.built_in import request_signature

OF_MODEL = Signature((TensorSpec("ids", "INT64", (-1, -1)),), (TensorSpec("output", "FP32", (-1, 8)),))


def test_handlers_of_texts_and_sounds_say_what_clients_send_instead_of_the_models_tensors() -> None:
    names = (("sequence_classifier", "text"), ("text_embedding", "text"), ("voice_activity", "audio"))
    for handler, name in names:
        signature = request_signature(handler, OF_MODEL)
        assert signature is not None
        signature.check()
        assert [(spec.name, spec.datatype) for spec in signature.inputs] == [(name, "BYTES")]
        assert request_signature(handler, None) == signature


def test_for_other_handlers_the_archives_signature_counts() -> None:
    assert request_signature("tensor", OF_MODEL) == OF_MODEL
    assert request_signature("my_handler.py", None) is None
