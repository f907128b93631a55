"""The handler of archives that need none, through the executor's host and on its own."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.signature import Signature, SignatureError, TensorSpec
from torchere.archiver.split import Split
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.errors import PredictionException
from torchere.handlers.loading.compile import autocasting
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.tensor_handler import TensorHandler
from torchere.handlers.tensors.answer import Wish, wish_header

NPY = "application/x-npy"


class Doubled(torch.nn.Module):
    """Counts its calls in the rows it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class SumAndDifference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": a + b, "difference": a - b}


class Whole(torch.nn.Module):
    """Has no batch dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Forgetful(torch.nn.Module):
    """Loses a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[1:]


class Reusing(torch.nn.Module):
    """Answers in a buffer of its own, as models with preallocated memory do."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor
        self.register_buffer("kept", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = self.kept[: x.numel()].view(x.shape)
        return answer.copy_(x * 2)


class Counting(torch.nn.Module):
    """Keeps the number of its runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Conjugate(torch.nn.Module):
    """Gives a view that is negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x).conj().imag


class Picky(torch.nn.Module):
    """Takes lengths of at least `least`, as packed sequences do."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < self.least).any()):
            raise ValueError("a length is too small")
        return x * 2


def spec(name: str, shape: tuple[int, ...], datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, datatype, shape)


ONE = Signature((spec("input", (-1, 3)),), (spec("output", (-1, 3)),))
FREE = Signature((spec("input", (-1, -1)),), (spec("output", (-1, -1)),))
TWO = Signature(
    (spec("a", (-1, 2), "INT64"), spec("b", (-1, 2), "INT64")),
    (spec("sum", (-1, 2), "INT64"), spec("difference", (-1, 2), "INT64")),
)
WHOLE = Signature((spec("x", (2, 2)),), (spec("y", ()),))


@pytest.fixture
def make_handler(tmp_path: Path, make_context: Callable[..., Context]) -> Callable[..., "Asked"]:
    """Makes a loaded handler of a model and its signature."""

    def make(model: torch.nn.Module, signature: Signature) -> Asked:
        torch.jit.save(torch.jit.script(model.eval()), str(tmp_path / "m.pt"))
        (tmp_path / "signature.json").write_text(signature.to_json())
        context = make_context(tmp_path, model={"serializedFile": "m.pt"})
        handler = TensorHandler()
        handler.initialize(context)
        return Asked(handler, context)

    return make


class Asked:
    """A handler that can be asked with rows; each is (row, headers)."""

    def __init__(self, handler: TensorHandler, context: Context) -> None:
        self.handler = handler
        self.context = context
        self.processors: list[RequestProcessor] = []

    def rows(self, *rows: dict[str, Any], **headers: Any) -> list[Any]:
        self.processors = [RequestProcessor(headers, "id") for _ in rows]
        self.context.begin_batch(self.processors, None)
        answers: list[Any] = self.handler.handle(list(rows), self.context)
        return answers

    def body(self, value: Any, **headers: Any) -> Any:
        return self.rows({"body": value}, **headers)[0]

    def refused(self, value: Any, **headers: Any) -> str:
        answer = self.body(value, **headers)
        assert self.processors[0].status_code == 400
        assert (answer["code"], answer["type"]) == (400, "BadRequestException")
        message: str = answer["message"]
        return message


def npy(array: np.ndarray) -> bytearray:
    file = io.BytesIO()
    np.save(file, array)
    return bytearray(file.getvalue())


OCTETS = {"body": {"content-type": "application/octet-stream"}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ([1, 2, 3], [2, 4, 6]),
        ([[1, 2, 3]], [[2, 4, 6]]),
        ([[1, 2, 3], [4, 5, 6]], [[2, 4, 6], [8, 10, 12]]),
        ({"input": [1, 2, 3]}, [2, 4, 6]),
        ({"input": [[1, 2, 3]]}, [[2, 4, 6]]),
        ({"inputs": [[1, 2, 3], [4, 5, 6]]}, [[2, 4, 6], [8, 10, 12]]),
        ({"inputs": [{"input": [1, 2, 3]}]}, [[2, 4, 6]]),
        ({"input": [1, 2, 3], "region": 3}, [2, 4, 6]),
        ({"inputs": [{"input": [1, 2, 3], "region": 3}], "id": "7"}, [[2, 4, 6]]),
        ({"instances": [[1, 2, 3]]}, {"predictions": [[2, 4, 6]]}),
        (bytearray(b"[1, 2, 3]"), [2, 4, 6]),
        ("[[1, 2, 3]]", [[2, 4, 6]]),
        (npy(np.array([1, 2, 3], np.float32)), [2, 4, 6]),
        (npy(np.array([[1, 2, 3]], np.float64)), [[2, 4, 6]]),
        (npy(np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))), [[0, 2, 4], [6, 8, 10]]),
    ],
)
def test_a_body_is_one_example_or_several(
    make_handler: Callable[..., Asked], body: object, wanted: object
) -> None:
    assert make_handler(Doubled(), ONE).body(body) == wanted


def test_raw_bytes_are_as_many_rows_as_they_are_long(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Doubled(), ONE)
    raw = bytearray(np.arange(6, dtype=np.float32).tobytes())
    assert asked.body(raw, **OCTETS) == [[0, 2, 4], [6, 8, 10]]
    assert "found 23 bytes, expected 12 bytes" in asked.refused(raw[:-1], **OCTETS)


BROKEN = b'{"x": [1, 2,3,4}'.ljust(24)  # as long as two rows of three FP32


@pytest.mark.parametrize(
    "said", ["application/json", "Application/JSON", "application/problem+json", "", "image/x"]
)
def test_broken_json_is_not_read_as_numbers(make_handler: Callable[..., Asked], said: str) -> None:
    asked = make_handler(Doubled(), ONE)
    assert "input: found text that is no JSON" in asked.refused(
        bytearray(BROKEN), body={"content-type": said}
    )


@pytest.mark.parametrize("body", [b"x" + BROKEN[1:], b"[" + b"\x80" * 11])
def test_bytes_that_their_type_says_are_json_are_not_read_as_numbers(
    make_handler: Callable[..., Asked], body: bytes
) -> None:
    asked = make_handler(Doubled(), ONE)
    message = asked.refused(bytearray(body), body={"content-type": "application/json"})
    assert "expected JSON, or raw bytes with the content type application/octet-stream" in message


def test_raw_bytes_without_a_type_may_begin_like_json(make_handler: Callable[..., Asked]) -> None:
    raw = b"[\x00\x80?" * 3
    wanted = (2 * np.frombuffer(raw, np.float32)).tolist()
    assert make_handler(Doubled(), ONE).body(bytearray(raw)) == [wanted]
    assert make_handler(Doubled(), ONE).body(bytearray(BROKEN), **OCTETS) != []


def test_a_broken_json_file_in_a_form_is_not_read_as_numbers(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Doubled(), ONE)
    for name in ("input", "data"):
        for said in ("application/json", "application/octet-stream"):
            (answer,) = asked.rows({name: bytearray(BROKEN)}, **{name: {"content-type": said}})
            assert "found text that is no JSON" in answer["message"]
            answer = asked.rows({name: bytearray(b"[1, 2, 3]")}, **{name: {"content-type": said}})
            assert answer == [[2, 4, 6]]


def test_a_list_of_no_rows_is_an_empty_batch(make_handler: Callable[..., Asked]) -> None:
    assert make_handler(Doubled(), ONE).body({"instances": []}) == {"predictions": []}
    assert make_handler(Doubled(), ONE).body({"inputs": []}) == []
    assert make_handler(Doubled(), ONE).refused([]).startswith("input: found the shape [0]")


class Reshaping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            raise RuntimeError("cannot reshape tensor of 0 elements")
        return x * 2


def test_an_input_without_elements_that_fails_the_model_is_refused(
    make_handler: Callable[..., Asked],
) -> None:
    empty = npy(np.zeros((0, 3), np.float32))
    assert make_handler(Doubled(), ONE).body(empty) == []
    with pytest.raises(PredictionException) as refused:
        make_handler(Reshaping(), ONE).body(empty)
    wanted = "input: found the shape [0, 3], expected an element: the model fails without"
    assert (refused.value.error_code, refused.value.message) == (400, wanted)


SCALARS = Signature((spec("a", ()), spec("b", ())), (spec("sum", ()), spec("difference", ())))


@pytest.mark.parametrize("a", [b"1.5", b"1.50", b"15e-1\n"])
def test_a_field_of_a_form_may_be_one_number(make_handler: Callable[..., Asked], a: bytes) -> None:
    asked = make_handler(SumAndDifference(), SCALARS)
    assert asked.rows({"a": bytearray(a), "b": bytearray(b"-2.0")}) == [{"sum": -0.5, "difference": 3.5}]
    one = np.array(1.5, "<f4").tobytes()
    assert asked.rows({"a": bytearray(one), "b": bytearray(one)}) == [{"sum": 3, "difference": 0}]


@pytest.mark.parametrize("a", [b".500", b"+1.5", b"1.5.", b"1-15", b"1e99"])
def test_text_like_a_number_is_never_read_as_raw_bytes(make_handler: Callable[..., Asked], a: bytes) -> None:
    (answer,) = make_handler(SumAndDifference(), SCALARS).rows({"a": bytearray(a), "b": bytearray(b"1")})
    assert (answer["code"], answer["message"][:1]) == (400, "a")
    assert make_handler(Doubled(), ONE).refused(bytearray(b"1.50")).startswith("input: found 0 dimensions")
    assert make_handler(Doubled(), ONE).body(bytearray(b"1.50" * 3), **OCTETS) != []


def test_inputs_may_come_by_name(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(SumAndDifference(), TWO)
    wanted = {"sum": [4, 6], "difference": [-2, -2]}
    assert asked.body({"a": [1, 2], "b": [3, 4]}) == wanted
    assert asked.rows({"a": bytearray(b"[1, 2]"), "b": npy(np.array([3, 4], np.int64))}) == [wanted]
    assert asked.rows({"a": bytearray(b"[1, 2]"), "b": "[3, 4]", "region": bytearray(b"3")}) == [wanted]
    assert asked.body({"inputs": [{"a": [1, 2], "b": [3, 4]}]}) == {"sum": [[4, 6]], "difference": [[-2, -2]]}
    assert asked.body({"instances": [{"a": [1, 2], "b": [3, 4]}]}) == {"predictions": [wanted]}


@pytest.mark.parametrize("signature", [ONE, FREE])
def test_requests_of_a_batch_keep_their_answers(
    make_handler: Callable[..., Asked], signature: Signature
) -> None:
    asked = make_handler(Doubled(), signature)
    bodies = [[1, 2, 3], [[4, 5, 6], [7, 8, 9]], [], [[0, 0, 0]], ["a", 1, 2], {"x": 1}]
    answers = asked.rows(*({"body": body} for body in bodies))
    assert answers[0] == [2, 4, 6]
    assert answers[1] == [[8, 10, 12], [14, 16, 18]]
    assert answers[3] == [[0, 0, 0]]
    assert [p.status_code for p in asked.processors] == [
        200,
        200,
        200 if signature is FREE else 400,
        200,
        400,
        400,
    ]


def test_other_shapes_go_through_the_model_in_a_group_of_their_own(
    make_handler: Callable[..., Asked],
) -> None:
    asked = make_handler(Doubled(), FREE)
    answers = asked.rows({"body": [1]}, {"body": [1, 2]}, {"body": [[3], [4]]}, {"body": [5, 6]})
    assert answers == [[2], [2, 4], [[6], [8]], [10, 12]]


def test_a_model_that_answers_in_its_own_buffer_does_not_mix_up_requests(
    make_handler: Callable[..., Asked],
) -> None:
    asked = make_handler(Reusing(), FREE)
    assert asked.rows({"body": [1]}, {"body": [1, 2]}, {"body": [3]}) == [[2], [2, 4], [6]]
    tensors = asked.rows(
        {"input": np.ones((1, 1), np.float32)},
        {"input": np.full((1, 2), 3, np.float32)},
        **dict([wish_header(Wish())]),
    )
    assert [answer["output"].tolist() for answer in tensors] == [[[2]], [[6, 6]]]
    alone = make_handler(Reusing(), Signature((spec("x", (1,)),), (spec("y", (1,)),)))
    assert alone.rows({"body": [1]}, {"body": [2]}, {"body": [3]}) == [[2], [4], [6]]


def test_a_view_that_is_negative_comes_as_its_numbers(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Conjugate(), ONE)
    assert asked.body([1, 2, 3]) == [-1, -2, -3]
    answer = asked.body([1, 2, 3], accept=NPY)
    assert np.load(io.BytesIO(answer)).tolist() == [-1, -2, -3]


def test_a_model_without_a_batch_runs_each_request_alone(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Whole(), WHOLE)
    assert asked.rows({"body": [[1, 2], [3, 4]]}, {"x": np.ones((2, 2), np.float32)}) == [10.0, 4.0]
    assert "the model takes no batches" in asked.refused({"inputs": [[[1, 2], [3, 4]]]})


def test_tensors_are_answered_with_tensors(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Doubled(), ONE)
    answers = asked.rows(
        {"input": np.ones((2, 3), np.float32)},
        {"input": np.zeros((0, 3), np.float32)},
        **dict([wish_header(Wish())]),
    )
    assert [answer["output"].tolist() for answer in answers] == [[[2, 2, 2], [2, 2, 2]], []]


def test_an_npy_file_comes_where_it_is_accepted(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Doubled(), ONE)
    for body, wanted in (([1, 2, 3], [2, 4, 6]), ([[1, 2, 3]], [[2, 4, 6]])):
        assert np.load(io.BytesIO(asked.body(body, ACCEPT=f"text/html, {NPY}"))).tolist() == wanted
    assert asked.processors[0].response_headers == {"content-type": NPY}


def test_an_npy_file_holds_one_output(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(SumAndDifference(), TWO)
    assert "the model has 2 outputs" in asked.refused({"a": [1, 2], "b": [3, 4]}, accept=NPY)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ([1, 2], r"input: found the shape [2], expected the shape [-1, 3]"),
        ([[[1, 2, 3]]], "input: found 3 dimensions, expected the shape [-1, 3]"),
        ([1, 2, None], "input.data[2]: found nothing, expected numbers for FP32"),
        ([[1, 2, 3], [1, 2]], "input.data[1]: found 2 elements, expected a list of 3"),
        ([1, 2, 1e39], "input.data[2]: found 1e+39"),
        ([True, 1, 2], "input.data[0]: found True"),
        ({}, "the body: found an empty object, expected 'input', or rows in 'inputs' or 'instances'"),
        ({"inputs": [{"y": 1}]}, "body.inputs[0]: found an object, expected an object with 'input'"),
        (7, "input: found 0 dimensions"),
        (bytearray(), "input: found an empty body"),
        (bytearray(b"[1, 2"), "input: found text that is no JSON"),
        (bytearray(b'["\xff"]'), "input: found text that is no JSON"),
        ("word", "input: found text that is no JSON"),
        (npy(np.array([1, 2, 3])), "input: found INT64, expected FP32"),
        (npy(np.array([1, np.inf, 1e39])), "input.data[2]: found 1e+39, expected a number within FP32"),
        (npy(np.array(["a"])), "a .npy file of <U1"),
        (bytearray(b"\x80\x04\x95"), "input: found 3 bytes, expected 12 bytes for FP32 of shape [1, 3]"),
    ],
)
def test_a_body_that_is_no_example_is_refused_by_its_field(
    make_handler: Callable[..., Asked], body: object, text: str
) -> None:
    assert text in make_handler(Doubled(), ONE).refused(body)


def test_a_row_without_any_input_is_refused(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(SumAndDifference(), TWO)
    answer = asked.rows({"a": [1, 2]})[0]
    assert answer["message"] == "the request: found the fields 'a', expected 'a', 'b', or a body"
    assert "the inputs: found [1, 2] rows" in asked.refused({"a": [[1, 2]], "b": [[1, 2], [3, 4]]})
    assert "an object with the inputs 'a', 'b'" in asked.refused([1, 2])


def test_json_that_came_as_a_form_is_refused_with_what_to_send(make_handler: Callable[..., Asked]) -> None:
    text, *_ = make_handler(Doubled(), ONE).rows({'{"data": [[1, 2, 3]]}': bytearray()})
    assert text["code"] == 400
    assert text["message"] == (
        "the request: found the fields '{\"data\": [[1, 2, 3]]}' of a form: JSON that came as "
        "application/x-www-form-urlencoded, which is what curl -d says of it; send it with "
        "-H 'Content-Type: application/json', expected 'input', or a body"
    )


def test_a_model_of_tensors_does_not_miss_the_names_of_classes(
    make_handler: Callable[..., Asked], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_handler(Doubled(), ONE)
    assert caplog.messages == []
    (tmp_path / "index_to_name.json").write_text('{"0": "cat"}')
    assert make_handler(Doubled(), ONE).handler.mapping == {"0": "cat"}


def test_a_model_that_does_not_keep_to_its_signature_is_not_believed(
    make_handler: Callable[..., Asked],
) -> None:
    with pytest.raises(ValueError, match=r"the shape \[1, 3\] for 2 rows"):
        make_handler(Forgetful(), ONE).rows({"body": [1, 2, 3]}, {"body": [4, 5, 6]})
    with pytest.raises(ValueError, match=r"the model gave 2 results; signature\.json names 1 outputs"):
        both = Signature((spec("a", (-1, 2)), spec("b", (-1, 2))), (spec("sum", (-1, 2)),))
        make_handler(SumAndDifference(), both).body({"a": [1, 2], "b": [3, 4]})


def test_whole_numbers_are_not_made_of_fractions(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(SumAndDifference(), TWO)
    assert "a.data[0]: found 1.5, expected whole numbers" in asked.refused({"a": [1.5, 2], "b": [3, 4]})


def test_the_warm_up_is_a_row_of_zeros_where_shapes_are_fixed(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Doubled(), ONE)
    rows = asked.handler.warmup_data()
    assert rows is not None
    assert asked.rows(*rows) == [[[0, 0, 0]]]
    assert make_handler(Doubled(), FREE).handler.warmup_data() is None


def test_an_index_that_may_be_out_of_range_is_not_tried_on_a_gpu(make_handler: Callable[..., Asked]) -> None:
    whole, fractions = make_handler(SumAndDifference(), TWO).handler, make_handler(Doubled(), ONE).handler
    assert whole.warmup_data() is not None
    whole.map_location = fractions.map_location = "cuda"  # the model and the rows stay where they are
    assert whole.warmup_data() is None
    assert fractions.warmup_data() is not None


def test_a_model_that_refuses_made_up_rows_is_served_all_the_same(
    make_handler: Callable[..., Asked], caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_handler(Picky(1), ONE).handler.warmup_data()
    assert rows is not None
    assert np.asarray(rows[0]["input"]).tolist() == [[1, 1, 1]]
    assert caplog.messages == []
    asked = make_handler(Picky(2), ONE)
    assert asked.handler.warmup_data() is None
    (line,) = caplog.messages
    assert line.startswith("not warmed up, as the model takes neither zeros nor ones: ")
    assert "a length is too small" in line
    assert asked.body([2, 2, 3]) == [4, 4, 6]


@pytest.mark.parametrize("config", [{}, {"autocast": "bfloat16"}])
@pytest.mark.parametrize("form", ["TorchScript", "a class", "an exported program"])
def test_the_first_request_meets_the_state_of_the_archive_in_each_form(
    make_handler: Callable[..., Asked], caplog: pytest.LogCaptureFixture, form: str, config: dict[str, str]
) -> None:
    caplog.set_level("INFO")
    asked = make_handler(Doubled(), ONE)
    model: torch.nn.Module = Counting().eval()
    if form == "an exported program":
        model = ServedProgram(torch.export.export(model, (torch.rand(1, 3),)))
    if form == "TorchScript":
        model = torch.jit.script(model)
    asked.handler.model = autocasting(model, config, torch.device("cpu"))
    assert asked.handler.warmup_data() is None
    assert any(line.startswith("not warmed up, as the model may keep state") for line in caplog.messages)
    assert [asked.body([1, 2, 3]) for _ in range(2)] == [[2, 3, 4], [3, 4, 5]]


def test_a_class_without_state_is_warmed_up(make_handler: Callable[..., Asked]) -> None:
    asked = make_handler(Doubled(), ONE)
    asked.handler.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout()).train()
    assert asked.handler.warmup_data() is not None


def test_describe_tells_the_signature(make_handler: Callable[..., Asked]) -> None:
    assert make_handler(Doubled(), ONE).body([], describe="True") == json.loads(ONE.to_json())


def test_bf16_models_take_and_give_numbers(make_handler: Callable[..., Asked]) -> None:
    signature = Signature((spec("input", (-1, 2), "BF16"),), (spec("output", (-1, 2), "BF16"),))
    asked = make_handler(Doubled(), signature)
    assert asked.body([1, 2]) == [2, 4]
    assert asked.body([[1.5, 2]]) == [[3, 4]]
    assert np.load(io.BytesIO(asked.body([1, 2], accept=NPY))).tolist() == [2, 4]
    assert asked.handler.warmup_data() is not None


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, RuntimeError, "needs signature.json in the archive"),
        ("{}", SignatureError, "version is None"),
        (
            Signature((spec("t", (-1,), "BYTES"),), (spec("y", (-1,)),)).to_json(),
            RuntimeError,
            "'t' is BYTES",
        ),
    ],
)
def test_an_archive_without_a_fitting_signature_does_not_load(
    tmp_path: Path, make_context: Callable[..., Context], text: str | None, error: type[Exception], words: str
) -> None:
    if text is not None:
        (tmp_path / "signature.json").write_text(text)
    with pytest.raises(error, match=words):
        TensorHandler().initialize(make_context(tmp_path, model={"serializedFile": "m.pt"}))


def test_no_envelope_is_taken_off_before_it(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    torch.jit.save(torch.jit.script(Doubled()), str(tmp_path / "m.pt"))
    (tmp_path / "signature.json").write_text(ONE.to_json())
    context = make_context(tmp_path, model={"serializedFile": "m.pt"})
    entry = load_entry_point("tensor", context, envelope="kserve")
    context.begin_batch([RequestProcessor({}, "id")], None)
    assert entry([{"body": {"instances": [[1, 2, 3]]}}], context) == [{"predictions": [[2, 4, 6]]}]


@pytest.mark.parametrize(("signature", "batched"), [(ONE, True), (WHOLE, False)])
def test_a_pipeline_is_told_whether_inputs_are_a_batch(
    monkeypatch: pytest.MonkeyPatch, signature: Signature, batched: bool
) -> None:
    monkeypatch.setattr(BaseHandler, "_torchere_load_part", lambda _self, split, *_given: split)
    handler = TensorHandler()
    handler.signature = signature
    assert handler._torchere_load_part(Split(pipeline=2)) == Split(pipeline=2, batched=batched)
