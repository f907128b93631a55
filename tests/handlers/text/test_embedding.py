from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.context import RequestProcessor
from torchere.handlers.envelopes import BodyEnvelope, JSONEnvelope, KServeEnvelope, KServev2Envelope
from torchere.handlers.errors import PredictionException
from torchere.handlers.tensors.answer import OPEN_INFERENCE
from torchere.handlers.text.tasks import TextEmbedding

tokenizers = pytest.importorskip("tokenizers", reason="install torchere[tokenizers]")


class States(torch.nn.Module):
    """Gives each token the vector (its number, 1), whatever its neighbours, and padding a vector far off."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        number = ids.float() + (1 - mask) * 1000.0
        return torch.stack([number, torch.ones_like(number)], dim=2)


class Attending(torch.nn.Module):
    """Attends to the tokens of a text: NaN if it has none, as a softmax gives."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        share = torch.log(mask.float()).softmax(1)
        return (share * ids.float())[:, :, None] + mask[:, :, None]


class Pooling(torch.nn.Module):
    """Gives the mean of a text's tokens and one more than their number: NaN as the mean of none."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = mask.sum(1).float()
        return torch.stack([(ids * mask).sum(1) / count, count + 1], dim=1)


class Sums(torch.nn.Module):
    """Takes its inputs in another order, as int32, and gives one vector a text, in a dict."""

    def forward(
        self, token_type_ids: torch.Tensor, attention_mask: torch.Tensor, input_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        assert input_ids.dtype == torch.int32
        count = attention_mask.sum(1).float() + token_type_ids.sum(1)
        return {"sum": torch.stack([(input_ids * attention_mask).sum(1).float(), count], dim=1)}


class Wrong(torch.nn.Module):
    """Gives a number for all texts together."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids.sum().float()


@pytest.fixture
def make(tmp_path: Path, make_context: Any, answering: Any) -> Callable[..., Any]:
    words = {"[UNK]": 0, "cats": 2, "sleep": 4, "dogs": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def maker(model: torch.nn.Module | None = None, **settings: Any) -> Any:
        torch.jit.save(torch.jit.script((model or States()).eval()), str(tmp_path / "model.pt"))
        context = make_context(
            tmp_path, model={"serializedFile": "model.pt"}, config={"handler": {"text_embedding": settings}}
        )
        return answering("text_embedding", context)

    return maker


def unit(*values: float) -> Any:
    length = sum(value * value for value in values) ** 0.5
    return pytest.approx([value / length for value in values])


def test_a_context_of_a_users_test_without_a_model_config_has_the_defaults(make: Any, tmp_path: Path) -> None:
    make()
    handler = TextEmbedding()
    manifest = {"model": {"serializedFile": "model.pt"}}
    context: Any = SimpleNamespace(system_properties={"model_dir": str(tmp_path)}, manifest=manifest)
    handler.initialize(context)
    assert handler.settings == TextEmbedding.defaults


@pytest.mark.parametrize(
    "row",
    [
        {"body": "cats sleep"},
        {"body": bytearray(b"cats sleep")},
        {"data": b"cats sleep"},
        {"text": "cats sleep"},
        {"body": {"text": "cats sleep"}},
        "cats sleep",
    ],
)
def test_a_text_is_answered_with_the_mean_over_its_tokens_of_length_one(make: Any, row: Any) -> None:
    assert make()(row) == [unit(3, 1)]


def test_what_leaves_the_device_of_the_model_is_one_vector_for_each_text(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, cpu = [], torch.Tensor.cpu

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", noting)
    make()({"body": "cats sleep dogs"})
    assert shapes == [(1, 2)]


def test_texts_of_all_requests_are_embedded_as_if_each_were_alone(make: Any) -> None:
    answers = make(texts_per_run=2)(
        {"body": "cats sleep dogs dogs"},
        {"body": {"text": ["dogs", "cats sleep", "sleep"]}},
        {"body": "cats"},
    )
    assert answers == [unit(4.5, 1), [unit(6, 1), unit(3, 1), unit(4, 1)], unit(2, 1)]


def test_an_embedding_of_a_pair_is_refused(make: Any) -> None:
    (refused,) = make()({"body": {"text": "cats", "text_pair": "dogs"}})
    assert refused["message"].startswith("The request has 'text_pair'; expected 'text' alone")


def test_a_list_of_one_text_is_answered_with_a_list_of_one_embedding(make: Any) -> None:
    assert make()({"body": {"text": ["dogs"]}}) == [[unit(6, 1)]]


def test_a_request_that_is_wrong_does_not_touch_its_batch_mates(make: Any) -> None:
    answer = make(max_texts=2, max_characters=20)
    wrong: list[Any] = [[], ["cats"] * 3, 7, ["cats", None], "x" * 21, "\ud800"]
    rows = [{"body": {"text": text}} for text in wrong]
    (form,) = answer({"good news": b""})
    assert "send it with -H 'Content-Type: text/plain'; expected 'text'" in form["message"]
    *refused, good = answer(*rows, {"x": 1}, {"body": b"\xff"}, {"body": "dogs"})
    assert good == unit(6, 1)
    assert [one["code"] for one in refused] == [400] * 8
    assert [one["message"].partition(";")[0].removeprefix("The request has ") for one in refused[:7]] == [
        "0 texts",
        "3 texts",
        "a int",
        "a NoneType",
        "a text of 21 characters",
        "text that has no form in UTF-8 (surrogates not allowed)",
        "the fields 'x'",
    ]
    assert "not UTF-8" in refused[7]["message"]
    assert [answer.context.get_response_status(index)[0] for index in (0, 7, 8)] == [400, 400, 200]


def test_a_text_in_any_depth_is_read(make: Any) -> None:
    deep: Any = {"text": "dogs"}
    for _ in range(5000):
        deep = {"text": deep}
    assert make()({"body": deep}) == [unit(6, 1)]


def test_a_batch_of_refusals_runs_no_model(make: Any) -> None:
    (refused,) = make()({"body": 1.5})
    assert refused["message"] == (
        'The request has a float; expected a text, {"text": "..."} or {"text": ["...", ...]}'
    )


def test_a_text_without_any_token_has_an_embedding_nevertheless(make: Any) -> None:
    assert make()({"body": {"text": ["", "cats"]}}) == [[[0.0, 0.0], unit(2, 1)]]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_text_without_any_token_for_which_a_model_has_no_number_has_an_embedding_nevertheless(
    make: Any, pooling: str
) -> None:
    answer = make(Attending(), pooling=pooling, normalize=False)
    assert answer({"body": {"text": ["", "cats"]}}) == [[[0.0], [3.0]]]


def test_a_text_without_any_token_has_an_embedding_if_the_model_pools_and_has_no_number_for_it(
    make: Any,
) -> None:
    answer = make(Pooling(), normalize=False)
    assert answer({"body": {"text": ["", "cats"]}}) == [[[0.0, 1.0], [2.0, 2.0]]]


def test_the_configuration_chooses_pooling_length_and_tokens(make: Any) -> None:
    answer = make(pooling="first", normalize=False, max_tokens=1)
    assert answer({"body": "dogs cats"}) == [[6.0, 1.0]]
    assert make(normalize=False, max_tokens=2)({"body": "dogs cats sleep"}) == [[4.0, 1.0]]


def test_the_signature_names_the_models_inputs_and_pooled_results_are_taken_as_they_are(
    make: Any, tmp_path: Path
) -> None:
    names = ("token_type_ids", "attention_mask", "input_ids")
    inputs = tuple(TensorSpec(name, "INT32", (-1, -1)) for name in names)
    signature = Signature(inputs, (TensorSpec("sum", "FP32", (-1, 2)),))
    (tmp_path / "signature.json").write_text(signature.to_json())
    answers = make(Sums(), normalize=False)({"body": {"text": ["cats sleep", "dogs"]}})
    assert answers == [[[6.0, 2.0], [6.0, 1.0]]]


def test_a_signature_of_another_kind_of_model_does_not_load(make: Any, tmp_path: Path) -> None:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [-1, 3]}
    (tmp_path / "signature.json").write_text(
        json.dumps({"version": 1, "inputs": [tensor], "outputs": [tensor]})
    )
    with pytest.raises(
        RuntimeError, match=r"input 'pixels' \(FP32\); the handler 'text_embedding' gives ids"
    ):
        make()


def test_the_open_inference_protocol_gets_an_array(make: Any) -> None:
    row = {"text": np.array([b"cats", b"dogs sleep"], dtype=object)}
    (found,) = make()(row, headers={OPEN_INFERENCE: "{}"})
    assert list(found) == ["embedding"]
    assert found["embedding"].tolist() == [unit(2, 1), unit(5, 1)]


def at_openais_path(answer: Any, *rows: Any) -> list[Any]:
    """The answers to a batch of requests at OpenAI's path, with a plain one between them."""
    openai, plain = {"url_path": "v1/embeddings"}, {"url_path": ""}
    headers = [plain if row == {"body": "cats"} else openai for row in rows]
    requests = [RequestProcessor(found, f"r{index}") for index, found in enumerate(headers)]
    answer.context.begin_batch(requests, None)
    found = answer.entry_point(list(rows), answer.context)
    return [json.loads(one) if isinstance(one, bytes) else one for one in found]


def test_openais_clients_are_answered_in_their_form_beside_plain_requests(make: Any) -> None:
    answer = make(max_tokens=2)
    one, plain, encoded = at_openais_path(
        answer,
        {"body": {"input": "cats sleep dogs", "model": "any", "encoding_format": "float", "user": "me"}},
        {"body": "cats"},
        {
            "body": bytearray(
                b'{"input": ["dogs", "cats sleep"], "encoding_format": "base64", "dimensions": 2}'
            )
        },
    )
    assert one == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": unit(3, 1)}],
        "model": answer.context.model_name,
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    assert plain == unit(2, 1)
    found = [np.frombuffer(base64.b64decode(line["embedding"]), "<f4").tolist() for line in encoded["data"]]
    assert found == [unit(6, 1), unit(3, 1)]
    assert [line["index"] for line in encoded["data"]] == [0, 1]
    assert encoded["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert answer.context.get_response_content_type(0) == "application/json"


def test_a_wrong_request_of_openais_form_does_not_touch_its_batch_mates(make: Any) -> None:
    answer = make(max_texts=2, max_characters=20)
    wrong: list[Any] = [
        *({"input": found} for found in ("", [], ["cats", ""], [1, 2], [[1, 2]], None, {"text": "cats"})),
        *({"input": "cats", "encoding_format": found} for found in ("int8", ["float"])),
        *({"input": "cats", "dimensions": found} for found in (3, "2", [2])),
        *({"input": ["cats"] * 3}, {"input": "x" * 21}, {"input": "\ud800"}, {"text": "cats"}, {}),
    ]
    rows = [*({"body": body} for body in [*wrong, "dogs", ["dogs"]]), {'{"input": "cats"}': b""}]
    *refused, plain, good = at_openais_path(answer, *rows, {"body": "cats"}, {"body": {"input": "dogs"}})
    assert plain == unit(2, 1)
    assert good["data"][0]["embedding"] == unit(6, 1)
    assert [one["code"] for one in refused] == [400] * len(rows)
    assert [answer.context.get_response_status(index)[0] for index in range(len(rows))] == [400] * len(rows)
    messages = [one["message"].removeprefix("The request ") for one in refused]
    assert len({*messages[:7]}) == 1
    assert messages[0].startswith(
        "has an 'input' that is empty or no text; expected a text or a list of texts"
    )
    assert messages[7:15] == [
        "has the encoding_format 'int8'; expected float or base64",
        "has the encoding_format ['float']; expected float or base64",
        "has the dimensions 3; expected 2, as the model has",
        "has the dimensions '2'; expected 2, as the model has",
        "has the dimensions [2]; expected 2, as the model has",
        "has 3 texts; expected 1 to 2 in one request",
        "has a text of 21 characters; expected at most 20",
        "has text that has no form in UTF-8 (surrogates not allowed); expected no lone surrogates",
    ]
    assert messages[15].startswith("has no 'input': found the fields 'text'; expected a text")
    assert "is not valid JSON" in messages[17]
    assert "a JSON list; expected an object" in messages[18]
    assert "send it with -H 'Content-Type: application/json'" in messages[19]


def test_texts_are_prepared_outside_of_a_batch(make: Any) -> None:
    (prepared,) = make().entry_point.instance.preprocess([{"body": "cats"}]).requests
    assert prepared.tokens[0].ids == [2]


def behind(envelope: Any, answer: Any, *bodies: Any) -> Any:
    answer.context.begin_batch([RequestProcessor({}, f"r{index}") for index in range(len(bodies))], None)
    return envelope(answer.entry_point).handle([{"body": body} for body in bodies], answer.context)


def test_an_envelope_may_make_several_rows_of_a_request(make: Any) -> None:
    answer = make(normalize=False)
    (found,) = behind(KServeEnvelope, answer, {"instances": ["cats", {"text": ["dogs", "sleep"]}]})
    assert found == {"predictions": [[2.0, 1.0], [[6.0, 1.0], [4.0, 1.0]]]}
    first, second = behind(JSONEnvelope, answer, {"instances": []}, {"instances": ["cats", "dogs"]})
    assert (json.loads(first), json.loads(second)) == (
        {"predictions": []},
        {"predictions": [[2.0, 1.0], [6.0, 1.0]]},
    )


def test_a_text_behind_an_envelope_is_not_read_letter_by_letter(make: Any) -> None:
    with pytest.raises(PredictionException, match="has the instances 'cats'; expected a list"):
        behind(KServeEnvelope, make(), {"instances": "cats"})


def test_a_wrong_row_behind_an_envelope_refuses_its_request(make: Any) -> None:
    answer = make()
    for bodies in ([{"instances": ["cats", 3]}], [{"instances": ["cats"]}, {"instances": [3]}]):
        with pytest.raises(PredictionException, match="a int; expected a text") as refused:
            behind(JSONEnvelope, answer, *bodies)
        assert refused.value.error_code == 400
    (refusal,) = behind(BodyEnvelope, answer, {"text": 3})
    assert refusal["code"] == 400


@pytest.mark.parametrize("envelope", [JSONEnvelope, KServeEnvelope, KServev2Envelope])
def test_tensors_reach_the_handler_past_an_envelope(make: Any, envelope: Any) -> None:
    answer, row = make(), {"text": np.array([b"cats", b"dogs sleep"], dtype=object)}
    tensors, plain = RequestProcessor({OPEN_INFERENCE: "{}"}), RequestProcessor({})
    enveloped = envelope(answer.entry_point)
    answer.context.begin_batch([tensors], None)
    (found,) = enveloped.handle([row], answer.context)
    assert found["embedding"].tolist() == [unit(2, 1), unit(5, 1)]
    answer.context.begin_batch([tensors, plain], None)
    with pytest.raises(PredictionException, match="tensors beside"):  # each then runs alone
        enveloped.handle([row, {"body": {"instances": ["cats"]}}], answer.context)


def test_a_result_that_is_no_embedding_is_an_error(make: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"the model gave \(\) for 1 texts; expected \[texts, tokens, size\]"
    ):
        make(Wrong())({"body": "cats"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "max"}, "pooling in model-config.yaml is 'max'; expected one of mean, first"),
        ({"texts_per_run": 0}, "texts_per_run in model-config.yaml is 0; expected 1 or more"),
        ({"max_texts": True}, "max_texts in model-config.yaml is True; expected a whole number"),
        ({"modle": "x"}, "text_embedding.modle in model-config.yaml is unknown"),
    ],
)
def test_a_wrong_configuration_does_not_load(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_the_warm_up_is_answered(make: Any) -> None:
    answer = make()
    assert len(answer(*answer.entry_point.warmup_data())) == 2
