"""The tables of `benchmarks/quantization.py`, and the tokenizer of its sentences."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from quantised.document import (
    _HEAD,
    _LIMITS,
    agreement,
    fastest_table,
    fastest_verdict,
    goals,
    table,
    verdict,
)
from quantised.fastest import Form
from quantised.measure import Row, geometric_mean
from quantised.minilm import Embedder, tokens

ROW = Row(
    title="net",
    data="photographs",
    method="int8-static",
    engine="onednn",
    fp32_ms={1: 4.0, 8: 32.0},
    int8_ms={1: 1.0, 8: 16.0},
    fp32_bytes=400,
    int8_bytes=100,
    drift=0.2,
    cosine=0.98,
    top1=None,
    engines="onednn 1 ms",
)
WORDS = {
    word: number
    for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "serve", "##d", "cafe", "!"])
}


FORMS = (
    Form("TorchScript", int8=False, ms={1: 4.0, 8: 32.0}, drift=0.0),
    Form("AOTInductor", int8=False, ms={1: 3.0, 8: 18.0}, drift=1e-7),
    Form("TorchScript", int8=True, ms={1: 1.0, 8: 9.0}, drift=0.1),
    Form("AOTInductor", int8=True, ms={1: 0.5, 8: 4.0}, drift=0.4),
)


def test_the_page_has_the_text_that_the_next_run_would_write() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/quantization.md").read_text(encoding="utf-8")
    assert page.startswith(f"{_HEAD}\n## Measured\n")
    assert page.endswith(_LIMITS)


def test_the_fastest_forms_that_agree_are_held_against_each_other() -> None:
    row = replace(ROW, forms=FORMS)
    assert fastest_table([row])[1] == [
        *("net", "AOTInductor", "TorchScript", "3 → 1 ms", "18 → 9 ms", "3.00 ×, 2.00 ×")
    ]
    said = fastest_verdict([row], 2.97)
    assert "2.45 × as fast" in said
    assert "goal 2.97 ×: missed" in said
    assert said.endswith("Below it: net at batch 8 (2.00 ×).")


def test_a_row_that_was_kept_is_the_same_row() -> None:
    row = replace(ROW, forms=FORMS, kept=("head",))
    assert Row.read(json.loads(json.dumps(asdict(row)))) == row


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)


def test_the_table_ends_with_the_means_of_all_models() -> None:
    lines = table([ROW, replace(ROW, int8_bytes=400)])

    assert lines[1][-2:] == ["4.00 ×, 2.00 ×", "4.00 ×"]
    assert lines[-1] == ["geometric mean", "", "", "", "4.00 ×, 2.00 ×", "2.00 ×"]


def test_what_has_no_classes_has_no_agreement_on_them() -> None:
    assert agreement([ROW])[1] == ["net", "0.2", "0.9800", "", "photographs"]


def test_the_verdict_names_what_is_below_the_goal_and_what_would_be_refused() -> None:
    slow = replace(ROW, title="slow", int8_ms={1: 4.0, 8: 8.0}, drift=0.5)

    text = verdict([ROW, slow], vnni=False, goal=2.0)

    assert "slow at batch 1 (1.00 ×)" in text
    assert "this one has none" in text
    assert "would refuse slow for the drift" in text
    assert "Every one is above it" in verdict([ROW], vnni=True, goal=2.0)


def test_layers_that_went_back_are_counted_beside_the_engine() -> None:
    row = replace(ROW, kept=("stem", "head"))

    assert table([row])[1][1] == "int8-static, onednn, 2 layers in fp32"


def test_what_misses_a_goal_is_named_with_the_goal() -> None:
    row = replace(ROW, title="far", int8_bytes=200, cosine=0.98, top1=0.9)

    text = goals([row, replace(ROW, cosine=0.995)])

    assert text == (
        "Missed: far is 0.50 times as large (goal 0.35); far has a cosine of 0.9800 (goal 0.99); "
        "far has the same first class in 90.0% (goal 97%)."
    )


def test_random_weights_are_not_asked_for_the_same_class_and_it_is_said_why() -> None:
    text = goals([replace(ROW, cosine=0.999, top1=0.5, trained=False)])

    assert text.startswith("All models are as small and as alike as asked for. Random weights")


def test_sentences_become_the_longest_known_pieces_without_accents() -> None:
    ids, mask = tokens("Served CAFÉ!", WORDS, 8)

    assert ids.tolist() == [[2, 4, 5, 6, 7, 3, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]


def test_a_word_with_an_unknown_piece_is_unknown_and_a_long_sentence_is_cut() -> None:
    assert tokens("servers serve", WORDS, 4)[0].tolist() == [[2, 1, 4, 3]]
    assert tokens("serve serve serve", WORDS, 4)[0].tolist() == [[2, 4, 4, 3]]


def test_padding_does_not_change_an_embedding() -> None:
    torch.manual_seed(0)
    model = Embedder().eval()

    short, padded = (model(*tokens("served cafe!", WORDS, length)) for length in (7, 12))

    torch.testing.assert_close(short, padded, rtol=1e-4, atol=1e-5)
    assert short.norm().item() == pytest.approx(1.0)
