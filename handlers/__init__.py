"""Public API for handler authors: what runs a model inside the server, and what it may use.

The names are imported when they are first used, so that a process that only reads `PredictionException` does
not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchere.handlers.base import BaseHandler
    from torchere.handlers.context import Context, RequestProcessor
    from torchere.handlers.errors import HandlerLoadError, PredictionException, UnsupportedOutput
    from torchere.handlers.image_classifier import ImageClassifier
    from torchere.handlers.image_segmenter import ImageSegmenter
    from torchere.handlers.micro_batching import MicroBatching
    from torchere.handlers.object_detector import ObjectDetector
    from torchere.handlers.streaming import send_intermediate_predict_response
    from torchere.handlers.text_classifier import TextClassifier
    from torchere.handlers.text_embedding import TextEmbedding
    from torchere.handlers.vision import VisionHandler
    from torchere.handlers.voice_activity import VoiceActivity

_HOMES = {
    "BaseHandler": "base",
    "Context": "context",
    "HandlerLoadError": "errors",
    "ImageClassifier": "image_classifier",
    "ImageSegmenter": "image_segmenter",
    "MicroBatching": "micro_batching",
    "ObjectDetector": "object_detector",
    "PredictionException": "errors",
    "RequestProcessor": "context",
    "TextClassifier": "text_classifier",
    "TextEmbedding": "text_embedding",
    "UnsupportedOutput": "errors",
    "VisionHandler": "vision",
    "VoiceActivity": "voice_activity",
    "send_intermediate_predict_response": "streaming",
}

__all__ = [
    "BaseHandler",
    "Context",
    "HandlerLoadError",
    "ImageClassifier",
    "ImageSegmenter",
    "MicroBatching",
    "ObjectDetector",
    "PredictionException",
    "RequestProcessor",
    "TextClassifier",
    "TextEmbedding",
    "UnsupportedOutput",
    "VisionHandler",
    "VoiceActivity",
    "send_intermediate_predict_response",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
