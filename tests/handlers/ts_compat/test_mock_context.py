from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchere.handlers.base import BaseHandler
from torchere.handlers.ts_compat.legacy import MockContext


class Rows(BaseHandler):
    """Answers without a model."""

    def initialize(self, context: object) -> None:
        self.initialized = True

    def preprocess(self, data: object) -> object:
        return data

    def inference(self, data: object, *args: object, **kwargs: object) -> object:
        return data

    def postprocess(self, data: object) -> object:
        return data


def test_a_handler_runs_with_it(write_archive: Callable[..., Path]) -> None:
    folder = write_archive({"model-config.yaml": "handler:\n  depth: 3\n"})
    context = MockContext(model_dir=str(folder), model_file="", model_yaml_config_file="model-config.yaml")
    assert context.manifest == {"model": {"serializedFile": "model.pt"}}
    assert context.system_properties["model_dir"] == str(folder)
    assert context.model_yaml_config == {"handler": {"depth": 3}}
    assert Rows().handle([1, 2], context) == [1, 2]
    assert [sample.name for sample in context.metrics.store] == ["HandlerTime"]
