"""Folders of Hugging Face that lack something; a stand-in for transformers, which is not installed."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.huggingface import loaded
from torchere.archiver.models.load.source import read_source


def refused(path: Path, match: str) -> None:
    with pytest.raises(ModelRefused, match=match) as caught:
        read_source(path, None, None, False)
    assert "\n" not in str(caught.value)


def test_a_hugging_face_folder_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(tmp_path, r"install torchere\[huggingface\]")
    (tmp_path / "config.json").write_text('{"architectures": ["os.system"]}')
    refused(tmp_path, "expected one name")


class _Pretrained(torch.nn.Linear):
    """As transformers' models are: what the weights lack, they have random numbers for."""

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> Any:
        missing = json.loads(Path(folder, "config.json").read_text())["missing"]
        return cls(1, 1), {"missing_keys": set(missing), "unexpected_keys": []}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["Net"], "missing": ["w", "b"]}, "lacks 2 of the weights of _Pretrained, b for"),
        ({"architectures": ["Config"]}, r"this transformers \(5\) has no model Config; install one"),
        ({"architectures": ["Other"]}, r"this transformers \(5\) has no model Other; install one"),
    ],
)
def test_a_hugging_face_folder_is_a_model_of_transformers_with_all_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], said: str
) -> None:
    transformers = ModuleType("transformers")
    transformers.__spec__ = ModuleSpec("transformers", None)
    quiet = SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
    utilities = SimpleNamespace(logging=quiet)
    transformers.__dict__.update(__version__="5", Net=_Pretrained, Config=dict, utils=utilities)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Net"], "missing": []}))
    assert isinstance(read_source(tmp_path, None, None, False).module, torch.nn.Module)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, said)


@pytest.mark.parametrize("folder", [".", "below"])
@pytest.mark.parametrize("name", ["../other/model.safetensors", "/srv/other/model.safetensors", ["x"]])
def test_a_hugging_face_folder_takes_no_weights_from_elsewhere(
    tmp_path: Path, name: Any, folder: str
) -> None:
    index = tmp_path / folder / "model.safetensors.index.json"
    index.parent.mkdir(exist_ok=True)
    index.write_text(json.dumps({"weight_map": {"w": "a", "b": name}}))
    (tmp_path / "config.json").write_text(json.dumps({"missing": []}))
    with pytest.raises(ModelRefused, match="weights should lie in"):
        loaded(_Pretrained, tmp_path, allow_pickle=False)
    index.write_text(json.dumps({"weight_map": {"w": "a"}}))
    (tmp_path / "config.json").write_text(json.dumps({"missing": [], "transformers_weights": name}))
    with pytest.raises(ModelRefused, match="weights should lie in"):
        loaded(_Pretrained, tmp_path, allow_pickle=False)
    (tmp_path / "config.json").write_text(json.dumps({"missing": []}))
    assert loaded(_Pretrained, tmp_path, allow_pickle=False)
