"""Models of transformers, small and with random weights: packed, and equal to a call by their users."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.source import read_source, source_with_example
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import Values, parse

transformers: Any = None  # until a test of this file runs: each process that collects would import it
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and of torch's tracer
Pack = Callable[..., Path]
Serve = Callable[..., list[Any]]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SMALL, "vocab_size": 100, "max_position_embeddings": 40}
PICTURE = {**SMALL, "image_size": 16, "patch_size": 8}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    global transformers  # noqa: PLW0603
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra huggingface)"
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "pair classifier": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)),
    "decoder": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=40)
    ),
    "encoder and decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=100,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    ),
    "pictures": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**PICTURE)),
    "pictures and texts": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**TEXT, "projection_dim": 8},
            vision_config={**PICTURE, "projection_dim": 8},
            projection_dim=8,
        )
    ),
}
INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "pair classifier": {"input_ids": (-1, -1), "attention_mask": (-1, -1), "token_type_ids": (-1, -1)},
    "decoder": {"input_ids": (-1, -1), "attention_mask": (-1, -1)},
    "encoder and decoder": {
        "input_ids": (-1, -1),
        "attention_mask": (-1, -1),
        "decoder_input_ids": (-1, -1),
    },
    "pictures": {"pixel_values": (-1, 3, 16, 16)},
    "pictures and texts": {
        "input_ids": (2, -1),
        "pixel_values": (2, 3, 16, 16),
        "attention_mask": (2, -1),
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp("folder") / "model"
        make().eval().save_pretrained(made[name])
    return made


def original(folder: Path) -> Any:
    """The model as its users load it."""
    name = read_source(folder, None, None, False).folder.model.__class__.__name__  # type: ignore[union-attr]
    return getattr(transformers, name).from_pretrained(folder).eval()


def values(name: str, length: int) -> dict[str, torch.Tensor]:
    """Inputs of another length than the example's, with padding and two texts where the model takes those."""
    ids = torch.randint(1, 90, (2, length))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    all_of_them = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(length) > length // 2).long().repeat(2, 1),
        "decoder_input_ids": torch.randint(1, 90, (2, 6)),
        "pixel_values": torch.rand(2, 3, 16, 16),
    }
    return {key: all_of_them[key] for key in INPUTS[name]}


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_is_packed_with_all_inputs_and_answers_as_the_model(
    pack: Pack, serve: Serve, folders: dict[str, Path], name: str
) -> None:
    archive = pack(serialized_file=folders[name], model_format="torchscript")
    signature = parse(open_archive(archive).read_text("signature.json"))
    assert {spec.name: spec.shape for spec in signature.inputs} == INPUTS[name]
    inputs = values(name, 13)
    (found,) = serve(archive, [{key: value.numpy() for key, value in inputs.items()}])
    with torch.no_grad():
        wanted = original(folders[name])(**inputs)
    logits = "logits_per_image" if name == "pictures and texts" else "logits"
    answer = torch.tensor(found[logits] if isinstance(found, dict) else found)
    torch.testing.assert_close(answer, wanted[logits], atol=1e-5, rtol=1e-4)


def test_lengths_end_where_the_positions_of_the_model_do(pack: Pack, folders: dict[str, Path]) -> None:
    archive = pack(serialized_file=folders["pair classifier"], model_format="torchscript")
    (limit,) = parse(open_archive(archive).read_text("signature.json")).inputs[0].limits
    assert (limit.dimension, limit.least, limit.most) == (1, 1, 40)


def test_ids_that_the_model_has_not_and_masks_of_another_length_are_refused_with_what_it_takes(
    pack: Pack, serve: Serve, folders: dict[str, Path]
) -> None:
    archive = pack(serialized_file=folders["pair classifier"], model_format="torchscript")
    ids, mask, kinds = parse(open_archive(archive).read_text("signature.json")).inputs
    assert (ids.values, mask.values, kinds.values) == (Values(0, 99), None, Values(0, 1))
    fine = {"input_ids": [[1, 99, 3]], "attention_mask": [[1, 1, 1]], "token_type_ids": [[0, 0, 0]]}
    bad: list[dict[str, Any]] = [
        {**fine, "input_ids": [[1, 100, 3]]},
        {**fine, "input_ids": [[1, -1, 3]]},
        {**fine, "token_type_ids": [[0, 2, 0]]},
        {**fine, "attention_mask": [[1, 1]]},
        {name: values[0] for name, values in {**fine, "attention_mask": [[1, 1]]}.items()},
    ]
    answers = serve(archive, [{name: np.array(value) for name, value in row.items()} for row in (fine, *bad)])
    assert isinstance(answers[0], list)
    assert {answer["code"] for answer in answers[1:]} == {400}
    assert [answer["message"] for answer in answers[1:]] == [
        "input_ids: found the number 100, expected whole numbers from 0 to 99",
        "input_ids: found the number -1, expected whole numbers from 0 to 99",
        "token_type_ids: found the number 2, expected whole numbers from 0 to 1",
        "attention_mask: found the shape [1, 2], expected the size 3 of dimension 1, as input_ids has it in "
        "dimension 1",
        "attention_mask: found the shape [2], expected the size 3 of dimension 0, as input_ids has it in "
        "dimension 0",
    ]


def test_an_example_chooses_the_inputs_and_fixes_the_length(
    pack: Pack, folders: dict[str, Path], tmp_path: Path
) -> None:
    example = {key: value.tolist() for key, value in values("pair classifier", 11).items()}
    del example["attention_mask"]
    arrays: dict[str, Any] = {key: np.array(value) for key, value in reversed(example.items())}
    np.savez(tmp_path / "x.npz", **arrays)
    given = {"serialized_file": folders["pair classifier"], "model_format": "torchscript"}
    signature = parse(open_archive(pack(**given, example=tmp_path / "x.npz")).read_text("signature.json"))
    assert [(spec.name, spec.shape) for spec in signature.inputs] == [
        ("input_ids", (-1, 11)),
        ("token_type_ids", (-1, 11)),
    ]
    np.savez(tmp_path / "y.npz", tokens=np.zeros((2, 3), np.int64))
    with pytest.raises(
        ModelRefused, match="the input 'tokens'; BertForSequenceClassification has input_ids, "
    ):
        pack(**given, example=tmp_path / "y.npz")
    np.save(tmp_path / "z.npy", np.zeros((2, 3), np.int64))
    signature = parse(open_archive(pack(**given, example=tmp_path / "z.npy")).read_text("signature.json"))
    assert [spec.name for spec in signature.inputs] == ["input_ids"]


def with_tokenizer(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a folder that has this `tokenizer_config.json`, too."""
    shutil.copytree(folder, to)
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


IDS_AND_MASK = ["input_ids", "attention_mask"]
ALL_THREE = [*IDS_AND_MASK, "token_type_ids"]
OF_TRANSFORMERS_5 = {"backend": "tokenizers"}


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        ({"model_input_names": IDS_AND_MASK}, IDS_AND_MASK),
        ({"model_input_names": ["input_ids"]}, ["input_ids"]),
        ({"model_input_names": ALL_THREE, **OF_TRANSFORMERS_5}, ALL_THREE),
        ({"tokenizer_class": "BertTokenizer", **OF_TRANSFORMERS_5}, ALL_THREE),
        ({"tokenizer_class": "DistilBertTokenizer", **OF_TRANSFORMERS_5}, IDS_AND_MASK),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, ALL_THREE),  # of transformers 4, with token types
        ({"tokenizer_class": "OfTheUser", **OF_TRANSFORMERS_5}, ALL_THREE),
        ({"model_input_names": "input_ids"}, ALL_THREE),
        ({}, ALL_THREE),
    ],
)
def test_optional_inputs_are_those_that_the_folders_tokenizer_makes(
    folders: dict[str, Path], tmp_path: Path, config: dict[str, Any], inputs: list[str]
) -> None:
    folder = with_tokenizer(folders["pair classifier"], tmp_path / "model", **config)
    source = read_source(folder, None, None, False)
    assert list(source.names or ()) == inputs
    assert [len(free.places) for free in source.sizes] == [len(inputs)]


def test_what_a_tokenizer_without_a_class_of_its_own_makes_is_what_the_archive_takes(
    pack: Pack, serve: Serve, folders: dict[str, Path], tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    shutil.copytree(folders["pair classifier"], folder)
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    tokenizer.save_pretrained(folder)
    inputs = dict(tokenizer("a"))
    archive = pack(serialized_file=folder, model_format="torchscript")
    signature = parse(open_archive(archive).read_text("signature.json"))
    assert {spec.name for spec in signature.inputs} <= set(inputs)
    (found,) = serve(archive, [{"body": inputs}])
    with torch.no_grad():
        wanted = original(folder)(**{name: torch.tensor([value]) for name, value in inputs.items()})
    torch.testing.assert_close(torch.tensor([found]), wanted.logits, atol=1e-5, rtol=1e-4)


def told(**options: Any) -> list[str]:
    """What is said before the model is built, or refused."""
    said: list[str] = []
    source = read_source(options["serialized_file"], None, None, False)
    source_with_example(source, BuildOptions(**options), said.append)
    return said


def test_a_line_says_which_inputs_the_tokenizer_does_not_make(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = with_tokenizer(
        folders["pair classifier"], tmp_path / "model", model_input_names=["input_ids", "attention_mask"]
    )
    assert told(serialized_file=folder)[1:] == [
        "without token_type_ids, since the folder's tokenizer does not make it; an --example may have it"
    ]
    assert len(told(serialized_file=folders["pair classifier"])) == 1


def test_a_line_says_how_the_lengths_of_an_example_may_vary(
    folders: dict[str, Path], tmp_path: Path, pack: Pack
) -> None:
    (tmp_path / "x.json").write_text(
        '{"attention_mask": [[1, 1, 1], [1, 1, 0]], "input_ids": [[1, 2, 3], [4, 5, 0]]}'
    )
    given: dict[str, Any] = {
        "serialized_file": folders["pair classifier"],
        "model_format": "torchscript",
        "example": tmp_path / "x.json",
    }
    (line,) = told(**given)
    option = "input_ids,attention_mask.1=1:40"
    assert line == f"texts have 3 tokens, as in the example; --dynamic {option} lets that vary"
    assert told(**given, dynamic_sizes=(option,)) == []
    signature = parse(open_archive(pack(**given, dynamic_sizes=(option,))).read_text("signature.json"))
    assert [spec.shape for spec in signature.inputs] == [(-1, -1), (-1, -1)]


def test_rows_without_a_batch_dimension_are_refused_with_the_shape_that_is_wanted(
    folders: dict[str, Path], tmp_path: Path, pack: Pack
) -> None:
    (tmp_path / "x.json").write_text('{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}')
    folder = folders["pair classifier"]
    with pytest.raises(
        ModelRefused, match=r"it runs on INT64\[1, 3\], INT64\[1, 3\]: give the example this batch dimension"
    ):
        pack(serialized_file=folder, model_format="torchscript", example=tmp_path / "x.json")


def test_weights_of_torch_save_are_read_like_any_pickle(
    pack: Pack, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "older"
    shutil.copytree(folders["pair classifier"], folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"no weights of PyTorch in it \(\*\.safetensors or pytorch_model"):
        read_source(folder, None, None, False)
    model = original(folders["pair classifier"])
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    found: Any = read_source(folder, None, None, False).module
    inputs = values("pair classifier", 9)
    with torch.no_grad():
        torch.testing.assert_close(found(*inputs.values())["logits"], model(**inputs).logits)
    torch.save({"odd": Path("x"), **model.state_dict()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"pytorch_model\.bin: its pickle holds more than tensors"):
        read_source(folder, None, None, False)


def test_an_adapter_and_weights_of_other_libraries_are_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "bert-base-uncased"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelRefused, match=r"adapter \(PEFT\) of bert-base-uncased.*merge_and_unload\(\)"):
        read_source(tmp_path, None, None, False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertModel"]}')
    (other / "tf_model.h5").touch()
    with pytest.raises(
        ModelRefused, match=r"it has tf_model\.h5, which is of another library; load the model"
    ):
        read_source(other, None, None, False)
