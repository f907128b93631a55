"""The section `parallel` of a model config, and the flag that writes it."""

import pytest
import yaml

from torchere.archiver.split import Split


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, None),
        (True, None),
        ({"workers": 2}, None),  # a key of the user's own
        ({"tensor": 2}, Split(tensor=2)),
        ({"pipeline": 4}, Split(pipeline=4)),
        ({"tensor": 2, "pipeline": 3}, Split(2, 3)),
        ({"tensor": 2, "plan": {"a": "colwise"}}, Split(tensor=2, plan={"a": "colwise"})),
        ({"pipeline": 2, "batched": False}, Split(pipeline=2, batched=False)),
        ({"tensor": 2, "weights": "s3://b/a%20key/"}, Split(tensor=2, weights="s3://b/a%20key/")),
        ({"weights": [0.5, 0.5]}, None),  # a section of the user's own
    ],
)
def test_the_section_is_read(section, expected) -> None:
    assert Split.read({"parallel": section}) == expected


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"tensor": 0}, "expected whole numbers from 1"),
        ({"tensor": "2"}, "expected whole numbers from 1"),
        ({"tensor": 2, "plans": {}}, "plans is not known"),
        ({"pipeline": 2, "batched": "no"}, "batched is 'no', expected true or false"),
        ({"tensor": 2, "plan": {"a": "diagonal"}}, "expected auto, or colwise"),
        ({"tensor": 2, "plan": "all"}, "expected auto, or colwise"),
        ({"tensor": 2, "weights": 3}, "weights is 3, expected s3://bucket/key"),
        ({"tensor": 2, "weights": "net.safetensors"}, "expected s3://bucket/key"),
        ({"tensor": 2, "weights": "s3://bucket"}, "expected s3://bucket/key"),
        ({"tensor": 2, "weights": "s3://bucket/a/../b"}, "expected s3://bucket/key"),
        ({"tensor": 2, "weights": "s3://bucket/a?versionId=1"}, "expected s3://bucket/key"),
        ({"weights": "s3://b/k"}, "weights is for two ranks or more"),
    ],
)
def test_a_wrong_section_is_refused_with_what_was_expected(section, text) -> None:
    with pytest.raises(ValueError, match=text):
        Split.read({"parallel": section})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tensor=2", "parallel: {tensor: 2}"),
        ("pipeline=3, tensor=2", "parallel: {tensor: 2, pipeline: 3}"),
        (
            "tensor=2,layers.*.up=colwise,down=rowwise",
            'parallel: {tensor: 2, plan: {"layers.*.up": "colwise", "down": "rowwise"}}',
        ),
        ("tensor=2,weights=s3://b/a=1/k", 'parallel: {tensor: 2, weights: "s3://b/a=1/k"}'),
    ],
)
def test_what_the_flag_says_is_written_as_a_section_that_reads_the_same(text: str, line: str) -> None:
    split = Split.parse(text)
    assert split.line() == line
    assert Split.read(yaml.safe_load(line)) == split


@pytest.mark.parametrize(
    "text",
    [
        *("", "2", "tensor", "tensor=", "tensor=1", "tensor=x", "tensor=2,tensor=2", "pipeline=2,up=colwise"),
        *("weights=s3://b/k", "tensor=2,weights=k"),
    ],
)
def test_a_wrong_flag_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Split.parse(text)


def test_a_style_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="expected auto, or colwise, rowwise"):
        Split.parse("tensor=2,up=diagonal")
