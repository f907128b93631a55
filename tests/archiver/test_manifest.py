"""The manifest: what is written, what is read, what is refused."""

from __future__ import annotations

import json

import pytest

from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import EPOCH_S, Manifest, created_on

FULL = Manifest(
    model_name="noop",
    model_version="1.0",
    serialized_file="model.pt",
    handler="service.py:handle",
    model_file="model.py",
    requirements_file="requirements.txt",
    config_file="model-config.yaml",
    created_on="31/12/2024 23:59:59",
    archiver_version="0.12.0",
    digests={"model.pt": "sha256:" + "0" * 64},
)


def parse(**members: object) -> Manifest:
    return Manifest.parse(json.dumps({"runtime": "python", "model": {"modelName": "m"}, **members}), "m.mar")


def test_members_are_written_in_torchserves_order() -> None:
    text = FULL.dump()
    whole = json.loads(text)
    assert list(whole) == ["createdOn", "runtime", "model", "archiverVersion", "torchere"]
    assert list(whole["model"]) == [
        "modelName",
        "serializedFile",
        "handler",
        "modelFile",
        "modelVersion",
        "requirementsFile",
        "configFile",
    ]
    assert text == json.dumps(whole, indent=2)


def test_members_that_were_not_given_are_left_out() -> None:
    assert json.loads(Manifest(model_name="m").dump()) == {
        "runtime": "python",
        "model": {"modelName": "m", "modelVersion": "1.0"},
    }


def test_what_is_written_is_read_back() -> None:
    assert Manifest.parse(FULL.dump(), "m.mar") == FULL


def test_unknown_members_are_kept() -> None:
    manifest = parse(description="d", model={"modelName": "m", "sourceVocab": "v.pt"})
    assert manifest.unknown == {"description": "d"}
    assert manifest.unknown_in_model == {"sourceVocab": "v.pt"}
    again = json.loads(manifest.dump())
    assert again["description"] == "d"
    assert again["model"]["sourceVocab"] == "v.pt"


def test_name_and_version_may_be_missing() -> None:
    manifest = parse(model={})
    assert (manifest.model_name, manifest.model_version) == (None, "1.0")


def test_a_manifest_may_say_nothing_of_the_model() -> None:
    manifest = Manifest.parse("{}", "m.mar")
    assert (manifest.model_name, manifest.model_version, manifest.handler) == (None, "1.0", None)


def test_a_version_given_as_a_number_is_taken_as_it_is_spelt() -> None:
    text = '{"runtime": "python", "model": {"modelName": "m", "modelVersion": 1.10}}'
    assert Manifest.parse(text, "m.mar").model_version == "1.10"


def test_without_a_runtime_it_is_python() -> None:
    assert Manifest.parse('{"model": {"modelName": "m"}}', "m.mar").runtime == "python"


def test_a_file_may_be_named_from_the_archives_root() -> None:
    manifest = parse(model={"handler": "./service.py:handle", "configFile": "./model-config.yaml"})
    assert (manifest.handler, manifest.config_file) == ("service.py:handle", "model-config.yaml")


def test_when_and_by_what_it_was_packed_may_be_numbers() -> None:
    manifest = parse(createdOn=1735689599, archiverVersion=1.0)
    assert (manifest.created_on, manifest.archiver_version) == ("1735689599", "1.0")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"model": None}, "Missing Model entry in manifest file."),
        ({"runtime": None}, "Runtime is not defined or invalid."),
        ({"runtime": "ruby"}, "Runtime is not defined or invalid."),
        ({"runtime": ["python"]}, "Runtime is not defined or invalid."),
        ({"model": {"modelVersion": None}}, "Model version is not defined."),
        ({"model": []}, "model is a list"),
        ({"model": {"modelName": 7}}, "modelName is 7"),
        ({"createdOn": ["today"]}, "createdOn is ['today']"),
        ({"model": {"modelName": "\ud800"}}, "modelName is"),
        ({"model": {"modelVersion": True}}, "modelVersion is True"),
        ({"model": {"serializedFile": "../../etc/passwd"}}, "leaves the archive"),
        ({"model": {"handler": "/tmp/x.py:handle"}}, "absolute path"),
        ({"model": {"configFile": "a\\b"}}, "backslash"),
        ({"torchere": 5}, "torchere is a int"),
        ({"torchere": {"digests": ["a"]}}, "torchere.digests is a list"),
        ({"torchere": {"digests": {"a": "md5:00"}}}, "not sha256:"),
    ],
)
def test_a_wrong_member_is_refused_by_name(members: dict[str, object], reason: str) -> None:
    with pytest.raises(ArchiveError) as caught:
        parse(**members)
    assert reason in caught.value.reason
    assert str(caught.value).startswith("m.mar: entry 'MAR-INF/MANIFEST.json': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\ufeff{}",
        '{"model": {}, "model": {}}',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_what_is_not_a_manifest_is_refused(text: str) -> None:
    with pytest.raises(ArchiveError):
        Manifest.parse(text, "m.mar")


def test_a_date_is_written_in_utc() -> None:
    assert created_on(EPOCH_S) == "01/01/1980 00:00:00"
    assert created_on(1735689599) == "31/12/2024 23:59:59"
