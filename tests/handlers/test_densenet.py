"""Tensors of clients for `densenet_handler`: what is read, and what is refused."""

import io
import os
import pickle
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.context import RequestProcessor
from torchere.handlers.densenet import DenseNetHandler, tensor_of_row
from torchere.handlers.errors import PredictionException
from torchere.handlers.resolve import class_of


def saved(value: Any, **options: Any) -> bytearray:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return bytearray(file.getvalue())


def as_npy(array: Any) -> bytearray:
    file = io.BytesIO()
    np.save(file, array)
    return bytearray(file.getvalue())


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("never",)


def deflated(archive: bytearray) -> bytearray:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return bytearray(file.getvalue())


def with_pickle(old: bytes, new: bytes) -> bytearray:
    """A file of torch.save with three ones, and with other bytes in its pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.ones(3)))) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            if name.endswith("data.pkl"):
                assert old in content
                content = content.replace(old, new)
            after.writestr(name, content)
    return bytearray(file.getvalue())


@pytest.mark.parametrize(
    "value", [saved(torch.ones(2, 3)), as_npy(np.ones((2, 3), "f4")), [[1.0] * 3] * 2, torch.ones(2, 3)]
)
def test_a_tensor_is_read_from_each_form(value: Any) -> None:
    assert torch.equal(tensor_of_row({"data": value}), torch.ones(2, 3))
    assert torch.equal(tensor_of_row({"body": value}), torch.ones(2, 3))


@pytest.mark.parametrize(
    "value",
    [
        saved(Runs()),
        bytearray(pickle.dumps(Runs())),
        saved(torch.ones(2), _use_new_zipfile_serialization=False),
        saved({"a": torch.ones(2)}),
        saved(torch.ones(1).expand(10**6)),
        deflated(saved(torch.zeros(10**5))),
        saved(torch.ones(2))[:-30],
        with_pickle(b"tq\x05Q", b"q\x05Q"),  # a storage without a tuple
        with_pickle(b"Q", b""),  # a tuple without a storage
        with_pickle(b"Rq\x0b.", b"J."),  # it ends in a number
        with_pickle(b"Rq\x0b.", b"0" * 5000 + b"."),
        with_pickle(b"K\x03", b"K\xc8"),  # larger than its record, and not than the file
        saved(torch.ones(2).to_sparse()),
        as_npy(np.array(["a"])),
        [1.0, "a"],
        {"a": 1},
        "text",
        None,
    ],
    ids=range(18),
)
def test_another_value_is_refused_and_not_run(value: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PredictionException) as refused:
        tensor_of_row({"body": value})
    assert refused.value.error_code == 400
    assert not list(tmp_path.iterdir())


def test_no_memory_is_taken_for_a_value_that_is_refused() -> None:
    large = b"c__builtin__\nbytearray\nJ" + (10**8).to_bytes(4, "little") + b"\x85R."
    value = with_pickle(b"ctorch._utils", large + b"ctorch._utils")
    tracemalloc.start()
    try:
        with pytest.raises(PredictionException, match="no tensor"):
            tensor_of_row({"body": value})
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_file_of_many_entries_is_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO(saved(torch.ones(3)))
    with zipfile.ZipFile(file, "a") as archive:
        for number in range(40):
            archive.writestr(f"archive/{number}", b"")
    monkeypatch.setattr("torchere.archiver.container.zip.read_central", None)
    with pytest.raises(PredictionException, match=r"not a tensor of torch\.save: ArchiveError"):
        tensor_of_row({"body": bytearray(file.getvalue())})


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.uint16),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(4, 3)[1:, :2],
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones((1,) * 64),
    ],
    ids=range(10),
)
def test_each_kind_of_dense_tensor_is_read(value: torch.Tensor) -> None:
    found = tensor_of_row({"body": saved(value)})
    assert (found.dtype, found.tolist()) == (value.dtype, value.tolist())


class Context:
    model_yaml_config = None
    manifest = None
    model_name = "m"
    metrics = None
    stages_s = (0.0, 0.0, 0.0)

    def __init__(self, count: int, **headers: str) -> None:
        self.requests = [RequestProcessor(headers, str(number)) for number in range(count)]

    def get_request_header(self, index: int, name: str) -> Any:
        return self.requests[index].get_request_property(name)

    def set_response_status(self, status: int, idx: int) -> None:
        self.requests[idx].report_status(status)

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.requests[idx].add_response_property("content-type", value)


def test_a_subclass_changes_the_inference_on_tensors_and_explains_them() -> None:
    class Own(DenseNetHandler):
        def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            return super().inference(data + 1)

        def get_insights(self, tensor_data: Any, inputs: Any, target: Any) -> Any:
            return [row.tolist() for row in tensor_data * target]

    handler = Own()
    handler.model, handler.device = (lambda rows: rows * 2), torch.device("cpu")
    (answer,) = handler.handle([{"body": [1.0]}], Context(1))
    assert answer.tolist() == [[4.0]]
    rows = [{"body": [1.0], "target": 3}, {"body": [2.0], "target": 4}]
    assert handler.handle(rows, Context(2, explain="True")) == [[3.0], [8.0]]


def built_in(name: str) -> Any:
    found = class_of(name, None)
    assert found is not None
    return found()


@pytest.mark.parametrize("is_profiled", [False, True])
def test_each_request_of_a_batch_gets_its_row_whatever_the_others_are(
    is_profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_profiled:
        monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")
    handler = built_in("densenet_handler")
    assert isinstance(handler, DenseNetHandler)
    handler.profiler_args = {"on_trace_ready": lambda profiler: None}
    handler.model, handler.device = (lambda rows: rows * 2), torch.device("cpu")
    context = Context(4)
    rows = [{"body": [1.0]}, {"body": "no"}, {"body": [[3.0, 4.0]]}, {"body": [2.0]}]
    answers = handler.handle(rows, context)
    assert [answers[0].tolist(), answers[2].tolist(), answers[3].tolist()] == [
        [[2.0]],
        [[[6.0, 8.0]]],
        [[4.0]],
    ]
    assert answers[1]["code"] == context.requests[1].status_code == 400


@pytest.mark.parametrize(
    "model", [lambda rows: (rows * 2, rows * 3), lambda rows: rows.sum(), lambda rows: rows.mean(0, True)]
)
def test_a_result_without_a_row_for_each_request_is_for_no_batch(model: Any) -> None:
    handler = built_in("densenet_handler")
    handler.model, handler.device = model, torch.device("cpu")
    rows = [{"body": [1.0]}, {"body": [2.0]}]
    with pytest.raises(ValueError, match="for a batch of 2; expected a tensor with a row for each"):
        handler.handle(rows, Context(2))
    (answer,) = handler.handle(rows[:1], Context(1))
    assert repr(answer) == repr(model(torch.ones(1, 1)))


@pytest.mark.parametrize("name", ["TorchScriptHandler", "BaseHandler"])
def test_the_handlers_of_the_cpp_backend_answer_files_of_rows(name: str) -> None:
    handler = built_in(name)
    handler.model, handler.device = (lambda rows: rows * 2), torch.device("cpu")
    answers = handler.handle([{"data": saved(torch.ones(3))}, {"body": b"no"}], Context(2))
    assert torch.equal(torch.load(io.BytesIO(answers[0])), torch.full((3,), 2.0))
    assert len(answers[0]) == len(saved(torch.ones(3)))  # its row alone, not the batch that it is a view of
    assert answers[1]["code"] == 400


@pytest.mark.parametrize("name", ["TorchScriptHandler", "densenet_handler"])
def test_an_explanation_is_refused(name: str) -> None:
    handler = built_in(name)
    handler.model, handler.device = (lambda rows: rows * 2), torch.device("cpu")
    with pytest.raises(PredictionException, match="gives no explanations") as refused:
        handler.handle([{"body": [1.0]}], Context(1, explain="True"))
    assert refused.value.error_code == 400
