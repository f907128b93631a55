"""Archives whose handler is a class in a shared library: compiled here, loaded and asked by a real server."""

import io
import json
import re
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_library import cpp_library

from torchere.archiver.cli import main

NAMES = json.dumps({"0": "zero", "1": "one", "2": "tw\u00f6"})
BATCH = "batchSize: 3\nmaxBatchDelay: 30000\nminWorkers: 1\nmaxWorkers: 1\n"
TEXT = {"name": "name", "datatype": "BYTES", "shape": [1]}
SIGNATURE = {"version": 1, "inputs": [{"name": "body", "datatype": "FP32", "shape": [3]}], "outputs": [TEXT]}
TWO_IN_THREADS = "isolation: thread\nminWorkers: 2\nmaxWorkers: 2\n"


class Rows(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def server(pack: Any, open_server: Any) -> Any:
    library, model = cpp_library(), io.BytesIO()
    torch.jit.save(torch.jit.script(Rows()), model)
    files = {"libhandlers.so": library, "m.pt": model.getvalue(), "index_to_name.json": NAMES}
    files["signature.json"] = json.dumps(SIGNATURE)
    common: Any = {"runtime": "LSP", "serializedFile": "m.pt"}
    pack("digits", {**files, "c.yaml": BATCH}, handler="libhandlers:Digits", configFile="c.yaml", **common)
    obedient: Any = {"runtime": "LSP", "handler": "libhandlers:Obedient", "configFile": "c.yaml"}
    texts = json.dumps({**SIGNATURE, "inputs": [{**TEXT, "name": "body"}]})
    files = {"libhandlers.so": library, "c.yaml": TWO_IN_THREADS, "signature.json": texts}
    pack("obedient", files, **obedient)
    pack("together", {"libhandlers.so": library, "c.yaml": BATCH}, **obedient)
    for name in ("digits", "obedient", "together"):
        reply = open_server.register(f"{name}.mar", initial_workers=2 if name == "obedient" else 1)
        assert reply.status == 200, reply.body
    return open_server


def ask(server: Any, model: str, body: bytes, **headers: str) -> Any:
    return server.call("POST", f"/predictions/{model}", body, **headers)


def ask_tensors(server: Any, model: str, body: bytes) -> Any:
    return server.call("POST", f"/v2/models/{model}/infer", body, content_type="application/json")


def at_once(server: Any, model: str, *bodies: bytes) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(lambda body: ask(server, model, body), bodies))


def test_a_batch_is_answered_row_by_row_and_a_request_without_tensor_gets_its_own_error(server: Any) -> None:
    two, none, one = at_once(
        server, "digits", saved(torch.tensor([0, 1, 5])), b"no tensor", saved(torch.tensor([2, 3, 1]))
    )
    assert [(two.status, two.body.decode()), (one.status, one.body)] == [(200, "tw\u00f6"), (200, b"one")]
    assert two.headers["data_type"] == "string"
    assert "content-type" not in {name.lower() for name in two.headers}
    assert none.status == 500
    message = "c10 error, failed to load tensor"
    assert none.headers["content-type"] == "application/json"
    assert none.json() == {"code": 500, "type": "InternalServerException", "message": message}
    assert server.logs("2 classes for 3 requests")  # they were one batch


def rewritten(file: bytes, old: bytes, new: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save, with other bytes in its pickle, or compressed."""
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as before, zipfile.ZipFile(content, "w", method) as after:
        for name in before.namelist():
            data = before.read(name)
            after.writestr(name, data.replace(old, new) if name.endswith("data.pkl") else data)
    return content.getvalue()


THREE = saved(torch.ones(3))


@pytest.mark.parametrize(
    ("wrong", "other"),
    [
        (rewritten(THREE, b"K\x03", b"J\xff\xff\xff\x00"), rewritten(THREE, b"K\x03t", b"K\x00t")),
        (
            saved(torch.ones(1).expand(10**6)),
            rewritten(saved(torch.zeros(9**6)), b"", b"", zipfile.ZIP_DEFLATED),
        ),
        (
            saved({"a": torch.ones(3)}),
            rewritten(THREE, b"_v2", b"_v2\nctorch._tensor\n_rebuild_from_type_v2"),
        ),
        (rewritten(THREE, b"t", b"0t"), b""),
        (
            rewritten(THREE, b"K\x03t", b"\x8a\x08" + struct.pack("<q", 3 - 2**62) + b"t"),
            rewritten(THREE, b"K\x03t", b"J\xff\xff\xff\xfft"),
        ),
    ],
    ids=["sizes", "repeated", "kinds", "damaged", "negative"],
)
def test_a_file_is_read_only_as_far_as_it_is_the_tensor_that_it_says(
    server: Any, wrong: bytes, other: bytes
) -> None:
    replies = at_once(server, "digits", wrong, other, saved(torch.tensor([0.0, 1.0, 0.0])))
    assert replies[2].body == b"one"
    for reply in replies[:2]:
        assert (reply.status, "failed to load tensor" in reply.json()["message"]) == (500, True)


def test_a_handler_gets_requests_as_the_backend_gave_them(server: Any) -> None:
    plain = ask(server, "obedient", b"request", content_type="text/plain; charset=utf-8", X_Name="Value")
    lines = plain.body.decode().splitlines()
    assert {"X-Name=Value", "body:contentType=text/plain", "body_dtype=bytes", "body: 7 bytes"} <= {*lines}
    part = b'--b\r\ncontent-disposition: form-data; name="data"; filename="f"\r\n\r\n%b\r\n--b--\r\n'
    form = part % saved(torch.tensor([0, 1, 0]))
    with ThreadPoolExecutor(3) as clients:
        kind = "multipart/form-data; boundary=b"
        forms = clients.map(lambda _: ask(server, "digits", form, content_type=kind), range(3))
    assert [reply.body for reply in forms] == [b"one"] * 3  # the field `data` is said to be bytes, too


def test_json_is_not_decoded_and_a_json_text_is_read(server: Any) -> None:
    text = b'json {"list": ["a", "\\u00e9\\ud83d\\ude00\\n\\"/\\\\"], "n": -12, "no": {"x": [], "y": null}}'
    reply = ask(server, "obedient", text, content_type="application/json")
    assert reply.body.decode() == '\u00e9\U0001f600\n"/\\ -12 false true'
    for wrong, said in (  # each is one text of `Fail`
        (b'{"a": 1', "the text ends too early"),
        (b"[1, 2] 3", "more text behind the value, at byte 7"),
        (b"[" * 999, "nested too deeply"),
        (b'{"n": 1, "list": [1, 2]}', "not a text: 2"),
        (b'{"n": 1, "list": [1]}', "no item 1"),
        (b'{"n": 1}', "no key 'list'"),
        (b'["\\ud8', "\\ud8 is no character"),
    ):
        assert said in ask(server, "obedient", b"json " + wrong).body.decode()


def test_tensors_of_the_open_inference_protocol_are_files_of_torch_save(server: Any) -> None:
    one = {"name": "body", "datatype": "FP32", "shape": [3], "data": [0, 1, 0]}
    asked = [json.dumps({"inputs": [one]}).encode()] * 3
    with ThreadPoolExecutor(3) as clients:
        replies = list(clients.map(lambda body: ask_tensors(server, "digits", body), asked))
    assert [reply.json()["outputs"][0]["data"] for reply in replies] == [["one"]] * 3
    text = {**TEXT, "name": "body", "data": ["hello"]}
    reply = ask_tensors(server, "obedient", json.dumps({"inputs": [text]}).encode())
    assert reply.json()["outputs"] == [{**TEXT, "data": ["hello"]}]


def test_a_handler_knows_its_model(server: Any) -> None:
    assert ask(server, "obedient", b"load").body == b"obedient -1 1 libhandlers:Obedient true"


def test_lines_of_the_log_keep_their_level_and_wrong_ones_fail_no_request(server: Any) -> None:
    assert ask(server, "obedient", b"log").status == 200
    assert server.logs("the pattern does not fit")
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    told = {line["message"].partition("] ")[2]: line for line in lines if line["logger"] == "cpp_handler"}
    assert told["Answer plain {}"]["level"] == "WARNING"
    assert told["Answer one and 2.00"]["level"] == "ERROR"
    assert told["Answer one and 2.00"]["model"] == "obedient"
    assert any(text.startswith("Answer {} and {} (the pattern does not fit its values") for text in told)
    assert "Answer too low" not in told
    assert re.match(r"handlers\.cc:\d+\] ", told["Answer plain {}"]["message"])


def test_declared_metrics_are_reported_beside_those_of_each_handler(server: Any) -> None:
    assert b"no metric Unknown" in ask(server, "obedient", b"metrics").body
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    assert 'HandlerTime{ModelName="other",Level="Model"' in text
    assert 'HandlerTime{ModelName="obedient",Level="Model"' in text
    assert 'PredictionTime{ModelName="obedient",Level="Model"' in text


def test_an_error_code_becomes_the_status_even_if_the_handler_throws_behind_it(server: Any) -> None:
    for body in (b"refuse", b"refuse and throw"):
        reply = ask(server, "obedient", body)
        assert reply.status == 507  # as TorchServe turns 413 into it
        assert reply.json()["message"] == 'too "large"'


def test_an_exception_fails_its_request_only(server: Any) -> None:
    fails, silent, works = at_once(server, "together", b"throw", b"silence", b"fine")
    assert (works.status, works.body) == (200, b"fine")
    for reply in (fails, silent):
        assert (reply.status, reply.json()["message"]) == (503, "Prediction failed")
    assert server.logs("RuntimeError: Obedient: told to throw")
    assert server.logs("RuntimeError: Obedient gave no response to request")


def test_each_worker_is_a_process_even_where_threads_are_asked_for(server: Any) -> None:
    workers = server.call("GET", "/models/obedient", api="management").json()[0]["workers"]
    assert len({worker["pid"] for worker in workers}) == len(workers) == 2


def test_a_crash_costs_its_request_and_the_worker_comes_back(server: Any) -> None:
    reply = ask(server, "obedient", b"crash")
    assert (reply.status, "Worker died." in reply.json()["message"]) == (500, True)
    assert server.logs("SIGSEGV")
    assert [ask(server, "obedient", b"on").body for _ in range(4)] == [b"on"] * 4


def other_torch(library: bytes) -> bytes:
    return re.sub(rb"(interface 1, torch )\d", rb"\g<1>1", library)


@pytest.mark.parametrize(
    ("library", "handler", "said"),
    [
        (None, "Digits", "the archive's library libhandlers.so can't be read (No such file or directory)"),
        (b"\x7fELF made for TorchServe", "Digits", "was compiled for TorchServe's C++ backend"),
        ("torch", "Digits", "libhandlers.so was compiled with torch 1."),
        ("cut", "Digits", "libhandlers.so can't be opened: "),
        ("whole", "Nobody", "exports no allocatorNobody() and deleterNobody()"),
        ("whole", "Unloadable", "Unloadable in libhandlers.so can't load its model: can't read the file"),
    ],
    ids=["missing", "of TorchServe", "other torch", "broken", "other class", "no weights"],
)
def test_a_library_that_cannot_serve_says_why_in_one_line(
    server: Any, pack: Any, library: bytes | str | None, handler: str, said: str
) -> None:
    whole = cpp_library()
    variants = {"whole": whole, "torch": other_torch(whole), "cut": b"not ELF" + whole[7:]}
    content = variants.get(library, b"") if isinstance(library, str) else library
    files = {} if content is None else {"libhandlers.so": content}
    archive = pack("refused", files, runtime="LSP", handler=f"libhandlers:{handler}")
    reply = server.register(archive, initial_workers=1)
    assert reply.status == 500
    detail = reply.json()["message"] + reply.json().get("detail", "")
    assert said in detail
    assert "\n" not in detail
    if "compiled" in said:
        command = "g++ -shared -fPIC HANDLER.cc -o libhandlers.so $(python -m torchere.handlers.cpp)"
        assert command in detail


def test_a_batch_is_at_most_what_one_byte_numbers(server: Any, pack: Any) -> None:
    archive = pack("large", {"libhandlers.so": cpp_library()}, runtime="LSP", handler="libhandlers:Obedient")
    reply = server.register(archive, initial_workers=1, batch_size=257)
    assert reply.status == 500
    assert "batchSize is 257" in json.dumps(reply.json())


def test_the_archiver_packs_the_library_that_the_handler_names(
    server: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libhandlers.so").write_bytes(cpp_library())
    monkeypatch.chdir(tmp_path)
    line = "--model-name packed --version 1.0 --handler libhandlers:Obedient --runtime LSP"
    assert main([*line.split(), "--extra-files", "libhandlers.so", "--export-path", str(store)]) in (0, None)
    assert server.register("packed.mar", initial_workers=1).status == 200
    assert ask(server, "packed", b"hello").body == b"hello"
