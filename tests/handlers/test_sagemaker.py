from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.resolve import EntryPoint, load_entry_point
from torchere.handlers.sagemaker import toolkit
from torchere.handlers.sagemaker.transformer import DefaultPytorchInferenceHandler, Transformer


@pytest.fixture
def load(
    write_archive: Callable[..., Path], make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, str]], EntryPoint]]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")

    def loaded(files: dict[str, str]) -> EntryPoint:
        return load_entry_point(
            "torchere.handlers.sagemaker", make_context(write_archive(files)), installed=True
        )

    yield loaded
    sys.modules.pop("inference", None)


def test_processes_that_a_script_starts_find_its_modules(load: Callable[..., EntryPoint]) -> None:
    script = (
        "import os, subprocess, sys\n"
        "def model_fn(folder):\n"
        "    assert os.environ['PYTHONPATH'].endswith('/elsewhere')\n"
        "    code = 'import in_code, in_folder, sys; sys.exit(in_code.word + in_folder.word)'\n"
        "    done = subprocess.run([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True)\n"
        "    assert done.stderr.strip() == 'twowords', done.stderr\n"
    )
    load({"code/inference.py": script, "code/in_code.py": "word = 'two'", "in_folder.py": "word = 'words'"})


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "text/csv;charset=utf-8"])
def test_the_default_functions_take_content_types_with_parameters(kind: str) -> None:
    body = b"[[1, 2]]" if "json" in kind else b"1, 2"
    values = DefaultPytorchInferenceHandler().default_input_fn(bytearray(body), kind)
    assert values.flatten().tolist() == [1.0, 2.0]


def test_the_decoder_reads_texts_of_a_numpy_file_and_ignores_bytes_behind_them() -> None:
    file = io.BytesIO()
    np.save(file, np.array(["two words", "one"]))
    assert toolkit.decode(file.getvalue() + b"more", toolkit.NPY).tolist() == ["two words", "one"]


def test_the_default_functions_of_the_toolkit_give_the_body_alone() -> None:
    functions = DefaultPytorchInferenceHandler()
    assert functions.default_output_fn(torch.tensor([1.5]), "application/json") == "[1.5]"
    assert functions.default_output_fn(torch.tensor([1.5]), "text/csv") == b"1.5\n"


def test_a_transformer_of_a_script_is_loaded_without_a_context_and_words_its_own_errors(
    tmp_path: Path, make_context: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Transformer):
        @staticmethod
        def handle_error(context: Any, inference_exception: Any, trace: str) -> list[str]:
            return [f"own words: {inference_exception.message}"]

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "inference.py").write_text(
        "def model_fn(folder): return folder\n"
        "def transform_fn(model, body, kind, accept): raise ValueError('broken')\n"
    )
    context = make_context(tmp_path)
    own = Own(DefaultPytorchInferenceHandler())
    own.validate_and_initialize(model_dir=str(tmp_path))
    begin(context)
    assert own.transform([{"body": b"{}"}], context) == ["own words: broken"]
    sys.modules.pop("inference", None)
