"""Hugging Face folders, packed for a handler of texts as the documents say, and answered from the archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.reader import open_archive
from torchere.handlers.context import RequestProcessor
from torchere.handlers.resolve import load_entry_point
from torchere.serving.commands import cli

tokenizers = pytest.importorskip("tokenizers", reason="install torchere[tokenizers]")
WORDS = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}


def test_a_classifier_of_transformers_is_packed_and_takes_texts(tmp_path: Path, make_context: Any) -> None:
    """As it stands in the quickstart: the folder, the handler, and nothing else."""
    transformers = pytest.importorskip("transformers", reason="install torchere[dev]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=len(WORDS), max_position_embeddings=16, id2label={0: "fine", 1: "awful"}, **sizes
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "bert" / "tokenizer.json"))
    words = ["--model-name", "bert", "--handler", "sequence_classifier", "--no-verify"]
    files = ["--serialized-file", str(tmp_path / "bert"), "--export-path", str(tmp_path)]
    assert cli.main(["archive", *words, *files]) == 0

    unpacked = tmp_path / "unpacked"
    archive = open_archive(tmp_path / "bert.mar")
    archive.extract(unpacked)
    serialized = archive.manifest.serialized_file
    context = make_context(unpacked, model={"serializedFile": serialized}, config={})
    entry_point = load_entry_point("sequence_classifier", context)
    context.begin_batch([RequestProcessor({}, "r0"), RequestProcessor({}, "r1")], None)
    answers: Any = entry_point([{"body": "good bad"}, {"body": "good " * 40}], context)
    with torch.no_grad():
        ids = torch.tensor([[2, 3]])
        wanted = model(input_ids=ids).logits.softmax(1)[0].tolist()
        longest = model(input_ids=torch.full((1, 16), 2)).logits.softmax(1)[0].tolist()
    assert list(answers[0]) == ["fine", "awful"]
    assert list(answers[0].values()) == pytest.approx(wanted, abs=1e-5)
    assert list(answers[1].values()) == pytest.approx(longest, abs=1e-5)
