"""`torchere predict` against a running server."""

import os
from pathlib import Path

import numpy as np
import pytest
from oip_suite.target import Target

from torchere.serving.commands.cli import main

pytestmark = pytest.mark.skipif(
    os.environ.get("TORCHERE_CLIENTS_TARGET") == "triton",
    reason="TorchServe's prediction API is not Triton's",
)


@pytest.fixture
def predict(target: Target, capsys: pytest.CaptureFixture[str]):
    """`predict(*arguments)`: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        address = target.grpc if "--grpc" in arguments else f"http://{target.http}"
        status = main(["predict", *arguments, "--address", address])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def array_file(folder: Path) -> str:
    path = folder / "x.npy"
    np.save(path, np.array([[1, 2, 3, 4]], "f4"))
    return str(path)


def test_json_is_sent_and_the_answer_printed(predict) -> None:
    assert predict("identity_FP32", "--json", '{"x": [1, 2, 3, 4]}')[:2] == (
        0,
        "[\n  1.0,\n  2.0,\n  3.0,\n  4.0\n]\n",
    )


def test_an_array_is_sent_as_npy(predict, tmp_path: Path) -> None:
    status, said, _ = predict("identity_FP32", "--npy", array_file(tmp_path))
    assert (status, said.split()) == (0, ["[", "[", "1.0,", "2.0,", "3.0,", "4.0", "]", "]"])


def test_a_version_is_named_behind_the_model(predict) -> None:
    assert predict("versioned/2", "--v2", "--json", "[[1]]")[1] == "y  FP32 [1, 1]\n[[3.]]\n"


@pytest.mark.parametrize("protocol", [(), ("--grpc",)])
def test_arrays_go_and_come_by_the_open_inference_protocol(predict, tmp_path: Path, protocol) -> None:
    file = array_file(tmp_path)
    status, said, _ = predict("two", "--v2", "--npy", f"a={file}", "--npy", f"b={file}", *protocol)
    assert status == 0
    assert said == "sum  FP32 [1, 4]\n[[2. 4. 6. 8.]]\n\ndifference  FP32 [1, 4]\n[[0. 0. 0. 0.]]\n"


@pytest.mark.parametrize("protocol", [(), ("--grpc",)])
def test_numbers_get_the_datatype_of_the_model(predict, protocol) -> None:
    assert predict("identity_UINT8", "--v2", "--json", "[[1, 2, 3, 4]]", *protocol)[1] == (
        "y  UINT8 [1, 4]\n[[1 2 3 4]]\n"
    )


def test_a_file_is_sent_with_its_type_or_the_one_given(predict, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_text('{"x": [1, 2, 3, 4]}')
    arguments = ("--file", str(tmp_path / "data.bin"), "--content-type", "application/json")
    assert predict("identity_FP32", *arguments)[0] == 0


def test_a_prediction_goes_over_grpc(predict) -> None:
    status, said, _ = predict("identity_FP32", "--json", '{"x": [1, 2, 3, 4]}', "--grpc")
    assert (status, said.split()[1]) == (0, "1.0,")


@pytest.mark.parametrize("protocol", [(), ("--grpc",), ("--v2",), ("--v2", "--grpc")])
def test_the_servers_error_is_shown_with_status_1(predict, protocol) -> None:
    status, said, error = predict("nobody", "--json", "[1]", *protocol)
    assert (status, said) == (1, "")
    assert "Model not found: nobody" in error


@pytest.mark.parametrize("protocol", [(), ("--grpc",)])
def test_no_server_is_status_1(capsys: pytest.CaptureFixture[str], protocol) -> None:
    address = "127.0.0.1:1" if protocol else "http://127.0.0.1:1"
    assert main(["predict", "m", "--json", "1", "--address", address, *protocol]) == 1
    assert "no connection to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json", "{"), "--json is no JSON"),
        (("--file", "/does/not/exist"), "torchere predict: /does/not/exist: No such file or directory"),
        (("--npy", "a=x.npy"), "need --v2"),
        (("--v2", "--file", "x"), "expected --json, --npy or --zeros"),
        (("--zeros", "a=1,2"), "expected a shape such as 1x3x224x224"),
        (("--zeros", f"a=1x{10**16}"), "the request or its answer does not fit into memory: Unable to"),
        (("--zeros", f"a=1x{10**20}"), f"--zeros a=1x{10**20}: no array of this shape can be made"),
        (("--json", "1", "--header", "x"), "expected 'Name: value'"),
        (("--json", "1", "--header", "x: é"), "the header 'x': the value holds"),
        (("--json", "1", "--header", "x: y", "--grpc"), "--header is for REST"),
        (("--json", "1", "--token-file", os.devnull), f"{os.devnull}: no key found"),
        (("--json", "1", "--token-file", "/does/not/exist"), "/does/not/exist: No such file"),
        (("--v2", "--npy", os.devnull), f"--npy {os.devnull}: no .npy file"),
    ],
)
def test_what_makes_no_request_is_status_2(predict, arguments, said: str) -> None:
    status, _, error = predict("two", *arguments)
    assert status == 2
    assert said in error


@pytest.mark.parametrize("copied_by", ["torchere.client.tensor", "torchere.client.inference.json_body"])
def test_zeros_whose_copies_do_not_fit_into_memory_are_status_2(
    predict, monkeypatch: pytest.MonkeyPatch, copied_by: str
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(copied_by, full)
    status, said, error = predict("identity_FP32", "--zeros", "1x4")
    assert (status, said) == (2, "")
    assert error == "torchere predict: the request or its answer does not fit into memory\n"


def test_an_array_without_a_name_needs_a_model_of_one_input(predict) -> None:
    status, _, error = predict("two", "--v2", "--json", "[[1, 2, 3, 4]]")
    assert (status, "the model takes a, b" in error) == (2, True)


def test_nothing_to_send_is_a_wrong_usage(target: Target) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", "two"])
    assert ended.value.code == 2


def test_an_array_of_objects_is_said_to_be_one(predict, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array(["a", None], dtype=object))
    status, _, error = predict("identity_FP32", "--v2", "--npy", str(path))
    assert (status, "of numbers or texts (Object arrays" in error) == (2, True)


@pytest.mark.parametrize("kind", ["npz", "broken zip"])
def test_a_file_of_several_arrays_or_of_something_else_is_refused(predict, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npz"
    if kind == "npz":
        np.savez(path, a=np.ones(3, "f4"))
    else:
        path.write_bytes(b"PK\x03\x04 and nothing of a zip file")
    status, said, error = predict("identity_FP32", "--v2", "--npy", str(path))
    assert (status, said) == (2, "")
    assert f"--npy {path}: no .npy file" in error


@pytest.mark.parametrize("protocol", [(), ("--grpc",)])
def test_zeros_of_a_shape_need_no_file(predict, protocol) -> None:
    status, said, _ = predict("identity_UINT8", "--zeros", "1x4", *protocol)
    assert (status, said) == (0, "y  UINT8 [1, 4]\n[[0 0 0 0]]\n")


@pytest.mark.parametrize("timeout", ["-1", "inf", "soon"])
def test_a_time_limit_that_is_none_is_a_wrong_usage(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", "two", "--json", "1", "--timeout", timeout])
    assert ended.value.code == 2
    assert "expected seconds above 0" in capsys.readouterr().err
