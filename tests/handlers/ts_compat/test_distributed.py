"""What handlers of large models import, without the ranks of a worker."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchere.handlers.ts_compat import alias


@pytest.fixture(autouse=True)
def ts() -> None:
    alias.install()


def context(tmp_path: Any, **config: Any) -> Any:
    return SimpleNamespace(
        model_name="m",
        manifest={},
        model_yaml_config=config,
        system_properties={"model_dir": str(tmp_path), "gpu_id": None},
    )


def test_a_handler_of_pippy_knows_its_rank_and_is_told_what_replaces_it(tmp_path: Any) -> None:
    from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver
    from ts.torch_handler.distributed.base_pippy_handler import BasePippyHandler

    class Handler(BasePippyHandler):
        def initialize(self, context: Any) -> None:
            super().initialize(context)
            self.model = get_pipeline_driver(None, self.world_size, context)

    handler = Handler()
    assert (handler.local_rank, handler.world_size) == (0, 1)
    with pytest.raises(RuntimeError, match=r"PiPPy has become torch\.distributed\.pipelining"):
        handler.initialize(context(tmp_path))
    assert str(handler.device) == "cpu"


def test_a_handler_of_deepspeed_has_the_device_of_its_rank(tmp_path: Any) -> None:
    from ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler

    handler = BaseDeepSpeedHandler()
    handler.initialize(context(tmp_path))
    assert str(handler.device) == "cpu"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of a stand-in for DeepSpeed."""
    calls: list[Any] = []
    stand_in = ModuleType("deepspeed")

    def init_inference(model: Any, **files: Any) -> str:
        calls.append((model, files))
        return "engine"

    stand_in.init_inference = init_inference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    return calls


def test_the_engine_of_deepspeed_gets_the_files_of_the_archive(tmp_path: Any, asked: list[Any]) -> None:
    from ts.handler_utils.distributed.deepspeed import get_ds_engine

    (tmp_path / "ds.json").write_text("{}")
    assert get_ds_engine("model", context(tmp_path, deepspeed={"config": "ds.json"})) == "engine"
    assert asked == [("model", {"config": str(tmp_path / "ds.json")})]
    with pytest.raises(ValueError, match=r"deepspeed\.checkpoint names c\.json, which is not there"):
        get_ds_engine("model", context(tmp_path, deepspeed={"config": "ds.json", "checkpoint": "c.json"}))
    with pytest.raises(ValueError, match="no section deepspeed"):
        get_ds_engine("model", context(tmp_path))


def test_the_engine_of_deepspeed_gets_the_weight_files_of_a_folder(tmp_path: Any, asked: list[Any]) -> None:
    from ts.handler_utils.distributed.deepspeed import get_ds_engine

    config = {"deepspeed": {"checkpoint": "c.json"}, "handler": {"model_path": "snapshot"}}
    weights = tmp_path / "snapshot"
    weights.mkdir()
    with pytest.raises(ValueError, match=r"handler\.model_path names .*snapshot, which holds no \.bin file"):
        get_ds_engine("model", context(tmp_path, **config))
    for name in ("two.bin", "one.bin", "config.json"):
        (weights / name).write_text("")
    get_ds_engine("model", context(tmp_path, **config))
    files = [str(weights / name) for name in ("one.bin", "two.bin")]
    listed = {"type": "ds_model", "checkpoints": files, "version": 1.0}
    assert asked == [("model", {"base_dir": str(weights), "checkpoint": listed})]
    (tmp_path / "c.json").write_text("{}")
    get_ds_engine("model", context(tmp_path, **config))
    assert asked[1] == ("model", {"base_dir": str(weights), "checkpoint": str(tmp_path / "c.json")})


def test_without_deepspeed_the_error_says_what_to_do(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ts.handler_utils.distributed.deepspeed import get_ds_engine

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="add it to the archive's requirements"):
        get_ds_engine("model", context(tmp_path, deepspeed={"config": "ds.json"}))
