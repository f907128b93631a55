"""Public API for handler authors: base classes, the context, built-in handlers and their errors.

The names are imported when they are first used, so that a process that only reads `PredictionException` does
not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchere.handlers import moved

if TYPE_CHECKING:
    from torchere.handlers.audio.voice_activity import VoiceActivity
    from torchere.handlers.base import BaseHandler
    from torchere.handlers.context import Context, RequestProcessor, send_intermediate_predict_response
    from torchere.handlers.errors import HandlerLoadError, PredictionException, UnsupportedOutput
    from torchere.handlers.micro_batching import MicroBatching
    from torchere.handlers.text import TextClassifier
    from torchere.handlers.text.tasks import TextEmbedding
    from torchere.handlers.ts_compat.legacy import MockContext
    from torchere.handlers.vision import VisionHandler
    from torchere.handlers.vision.tasks import ImageClassifier, ImageSegmenter, ObjectDetector

_HOMES = {
    "BaseHandler": "base",
    "Context": "context",
    "HandlerLoadError": "errors",
    "ImageClassifier": "vision.tasks",
    "ImageSegmenter": "vision.tasks",
    "MicroBatching": "micro_batching",
    "MockContext": "ts_compat.legacy",
    "ObjectDetector": "vision.tasks",
    "PredictionException": "errors",
    "RequestProcessor": "context",
    "TextClassifier": "text",
    "TextEmbedding": "text.tasks",
    "UnsupportedOutput": "errors",
    "VisionHandler": "vision",
    "VoiceActivity": "audio.voice_activity",
    "send_intermediate_predict_response": "context",
}

__all__ = [
    "BaseHandler",
    "Context",
    "HandlerLoadError",
    "ImageClassifier",
    "ImageSegmenter",
    "MicroBatching",
    "MockContext",
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


moved.install()
