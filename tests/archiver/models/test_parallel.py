"""`torchere archive --parallel`: a model is tried over ranks and compared before it is packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.ranks import in_ranks
from torchere.archiver.models.spread.huggingface import spread_folder
from torchere.archiver.split import Split
from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.metrics import MetricsCache
from torchere.handlers.tensor_handler import TensorHandler
from torchere.serving.commands.cli import main

LAYERS = """
import torch

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(self.Block() for _ in range(4))

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(ACTIVATION(self.up(x)))

    def forward(self, x):
        for block in self.blocks:
            x = CALL(x)
        return x
"""
PLAN = "blocks.*.up=colwise,blocks.*.down=rowwise"
Archive = Callable[..., tuple[int, str]]


@pytest.fixture
def archive(tmp_path: Path, capsys: Any) -> Archive:
    """Runs the command for a class, which computes `activation` between its layers."""
    np.save(tmp_path / "example.npy", np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8))

    def run(*arguments: str, activation: str = "torch.relu", call: str = "block") -> tuple[int, str]:
        source = LAYERS.replace("ACTIVATION", activation).replace("CALL", call)
        (tmp_path / "layers.py").write_text(source)
        space: dict[str, Any] = {}
        exec(source, space)
        torch.manual_seed(0)
        torch.save(space["Layers"]().state_dict(), tmp_path / "layers.pth")
        given = [
            "archive",
            "--model-name=layers",
            f"--export-path={tmp_path}",
            f"--model-file={tmp_path / 'layers.py'}",
            f"--serialized-file={tmp_path / 'layers.pth'}",
            "--force",
            *arguments,
        ]
        status = main(given)
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("split", "section", "ranks"),
    [
        ("tensor=2", "{tensor: 2}", 2),
        ("pipeline=2", "{pipeline: 2}", 2),
        (f"tensor=2,pipeline=2,{PLAN}", "{tensor: 2, pipeline: 2, plan: ", 4),
    ],
)
def test_a_plan_that_works_is_written_into_the_archives_configuration(
    archive: Archive, tmp_path: Path, split: str, section: str, ranks: int
) -> None:
    (tmp_path / "own.yaml").write_text("batchSize: 4")
    status, said = archive(
        f"--parallel={split}",
        f"--example={tmp_path / 'example.npy'}",
        f"--config-file={tmp_path / 'own.yaml'}",
    )
    assert status == 0, said
    assert f"trying {ranks} ranks ..." in said
    assert f"over {ranks} ranks: the answers differ by " in said
    assert "of 0.0 MB of weights a rank holds 0.0 MB" in said
    config = (
        open_archive(tmp_path / "layers.mar").extract(tmp_path / "packed").joinpath("own.yaml").read_text()
    )
    assert config.startswith(f"batchSize: 4\nparallel: {section}")


def test_a_plan_whose_answers_differ_is_refused(archive: Archive, tmp_path: Path) -> None:
    status, said = archive(
        f"--parallel=tensor=2,{PLAN}",
        f"--example={tmp_path / 'example.npy'}",
        activation="(lambda x: x.softmax(-1))",
    )
    assert status == 2
    assert "between the ranks and one process, more than 0.0001: the plan splits what the model needs" in said
    assert not (tmp_path / "layers.mar").exists()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pipeline_takes_rows_that_depend_on_each_other_in_one_part(
    archive: Archive, tmp_path: Path, rows: int
) -> None:
    np.save(tmp_path / "rows.npy", np.load(tmp_path / "example.npy")[:rows])
    meet = "(lambda x: torch.relu(x - x.mean(0)))"
    status, said = archive("--parallel=pipeline=2", f"--example={tmp_path / 'rows.npy'}", activation=meet)
    assert status == 0, said
    assert "all rows pass the stages in one part: the output 'output' of a row depends on the other" in said
    packed = open_archive(tmp_path / "layers.mar").extract(tmp_path / "packed")
    config = (packed / "model-config.yaml").read_text()
    assert Split.read(yaml.safe_load(config)) == Split(pipeline=2, batched=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--parallel=tensor=2,up=colwise"], "parallel.plan: no layer is called up"),
        ([f"--parallel=tensor=3,{PLAN}"], "blocks.0.up of size 16 can't be split over 3 ranks"),
        (["--parallel=tensor=2,blocks.*.up=colwise"], "failed: RuntimeError: mat1 and mat2"),
        (["--parallel=pipeline=9"], "no list of 9 layers"),
        (["--parallel=pipeline=2", "--format=export"], "expected --model-file or such a folder, without"),
    ],
)
def test_a_plan_that_does_not_work_is_refused_in_one_line(
    archive: Archive, tmp_path: Path, arguments: list[str], text: str
) -> None:
    status, said = archive(*arguments, f"--example={tmp_path / 'example.npy'}")
    assert status == 2
    assert text in said.splitlines()[-1]


def test_a_model_that_does_not_call_its_layers_is_refused(archive: Archive, tmp_path: Path) -> None:
    status, said = archive(
        "--parallel=pipeline=2",
        f"--example={tmp_path / 'example.npy'}",
        call="(lambda x: x + block.down(block.up(x)))",
    )
    assert status == 2
    assert "calls the layers of its largest list once each" in said.splitlines()[-1]


def test_auto_refuses_a_model_without_pairs_of_layers(archive: Archive, tmp_path: Path) -> None:
    example = f"--example={tmp_path / 'example.npy'}"
    status, said = archive("--parallel=tensor=2", example, activation="(lambda x: x.softmax(-1))")
    assert (status, "auto finds no pair of linear layers to split" in said) == (2, True)


def test_without_inputs_or_beside_another_section_nothing_is_tried(archive: Archive, tmp_path: Path) -> None:
    status, said = archive("--parallel=pipeline=2", "--handler=base_handler")
    assert (status, "give --example with inputs" in said) == (2, True)
    (tmp_path / "c.yaml").write_text("parallel: {tensor: 4}\n")
    example = f"--example={tmp_path / 'example.npy'}"
    status, said = archive("--parallel=pipeline=2", example, f"--config-file={tmp_path / 'c.yaml'}")
    assert (status, "has a section parallel; take it out" in said) == (2, True)
    with pytest.raises(SystemExit):
        archive("--parallel=pipeline=one")


def test_weights_that_stay_in_s3_are_named_in_the_archive_and_not_read(
    archive: Archive, tmp_path: Path, capsys: Any
) -> None:
    split = f"--parallel=tensor=2,{PLAN},weights=s3://bucket/net"
    example = f"--example={tmp_path / 'example.npy'}"
    status, said = archive(split, example)
    assert (status, "layers.pth has weights, and --parallel says that they are at s3://b" in said) == (
        2,
        True,
    )
    given = ["--model-name=net", f"--model-file={tmp_path / 'layers.py'}", f"--export-path={tmp_path}"]
    assert main(["archive", *given, split, example]) == 0
    said = capsys.readouterr().err
    assert "the weights are those that the class makes; those at s3://bucket/net are not read here" in said
    assert "over 2 ranks: the answers differ by" in said
    folder = open_archive(tmp_path / "net.mar").extract(tmp_path / "packed")
    assert not list(folder.glob("*.pth"))
    section = yaml.safe_load((folder / "model-config.yaml").read_text())["parallel"]
    assert (section["tensor"], section["weights"]) == (2, "s3://bucket/net")


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ("parallel: {tensor: 2, weights: s3://bucket/net}\n", True),
        ("batchSize: 2\nparallel:\n  plan: auto\n  pipeline: 2\nminWorkers: 1\n", True),
        ("parallel: {workers: 2}\nother: {tensor: 2}\n", False),  # another program's
    ],
)
def test_a_model_for_ranks_is_not_converted(
    archive: Archive, tmp_path: Path, config: str, is_refused: bool
) -> None:
    (tmp_path / "c.yaml").write_text(config)
    example, given = f"--example={tmp_path / 'example.npy'}", f"--config-file={tmp_path / 'c.yaml'}"
    status, said = archive("--format=torchscript", "--trace", "--no-verify", example, given)
    assert (status, "c.yaml has the section parallel, which spreads a class over" in said) == (
        (2, True) if is_refused else (0, False)
    )


def test_a_hugging_face_folder_is_packed_and_served_by_ranks_that_read_their_slices(
    tmp_path: Path, capsys: Any
) -> None:
    import transformers  # takes a second, also of a process that runs other tests

    torch.manual_seed(4)
    make: Any = transformers.LlamaConfig
    config = make(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 32},
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    with pytest.raises(ModelRefused, match="a Hugging Face folder has its weights beside"):
        spread_folder(tmp_path / "llama", Split(tensor=2, weights="s3://b/k"), torch.device("cpu"))
    (tmp_path / "llama" / "modeling.py").touch()
    given = ["--model-name=llama", f"--serialized-file={tmp_path / 'llama'}", f"--export-path={tmp_path}"]
    assert main(["archive", *given, "--parallel=tensor=2,pipeline=2"]) == 0
    assert "over 4 ranks: the answers differ by " in capsys.readouterr().err
    packed = open_archive(tmp_path / "llama.mar")
    folder = packed.extract(tmp_path / "packed")
    assert not (folder / "modeling.py").exists()
    row = {"input_ids": [5, 3, 9, 1], "attention_mask": [1, 1, 1, 1]}

    def answer(_rank: int) -> Any:
        context = Context(
            model_name="llama",
            model_dir=str(folder),
            manifest=json.loads(packed.manifest.dump()),
            gpu=None,
            batch_size=1,
            mms_version="0.12.0",
            metrics=MetricsCache("llama"),
            model_yaml_config=yaml.safe_load((folder / "model-config.yaml").read_text()),
        )
        handler = TensorHandler()
        handler.initialize(context)
        context.begin_batch([RequestProcessor({}, "1")], lambda index, chunk: None)
        return handler.handle([row], context)

    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([row["input_ids"]])).logits
    for found in in_ranks(4, answer):
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)
