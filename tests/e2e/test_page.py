"""The page at `/` of the inference port, in a real browser and without one."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import Browser, browser

from torchere.archiver.signature import Limit, Signature, TensorSpec, Values
from torchere.serving.commands.cli import main

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOSTILE = "<img src=x onerror=document.title='hacked'>"


class Limited(torch.nn.Module):
    """Takes some sizes and numbers only."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x.sum((1, 2)) + ids.sum(1)


LIMITED = Signature(
    (
        TensorSpec("x", "FP32", (-1, -1, 2), (Limit(1, 4, 512),)),
        TensorSpec("ids", "INT64", (-1, -1), (Limit(1, 3, None, 2), Limit(0, 1, 64)), Values(1, 9)),
    ),
    (TensorSpec("y", "FP32", (-1,)),),
)


@pytest.fixture(scope="module")
def server(store: Path, start_server: Callable[..., Any], pack: Callable[..., str]) -> Any:
    """A server with tokens: a model with a signature, one with limits, and one whose signature is markup."""
    torch.jit.script(torch.nn.Softmax(1)).save(store.parent / "odds.pt")
    (store.parent / "x.json").write_text("[[0.0, 0.0]]")
    arguments = ["archive", "--model-name=odds", f"--export-path={store}"]
    arguments += [f"--serialized-file={store.parent}/odds.pt", f"--example={store.parent}/x.json"]
    assert main(arguments) == 0
    spec = [{"name": HOSTILE, "datatype": "FP32", "shape": [-1, 2]}]
    files = {
        "service.py": "def handle(data, context):\n    return [str(row) for row in data or []]\n",
        "signature.json": json.dumps({"version": 1, "inputs": spec, "outputs": spec}),
    }
    pack("hostile", files, handler="service.py")
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(Limited()), script)
    limited = {"m.pt": script.getvalue(), "signature.json": LIMITED.to_json()}
    pack("limited", limited, handler="tensor", serializedFile="m.pt")
    pack("broken", {"service.py": "a secret of the model"}, handler="service.py")
    names = ("odds", "hostile", "limited", "broken")
    return start_server("--models", *(f"{name}={name}.mar" for name in names))


@pytest.fixture(scope="module")
def window(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page, after the user gave the key."""
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(f"http://{server.rest['inference']}/")
        assert opened.text("//p[@id='told'][text()]") == "Give a key to see the models."
        server.follow("odds:1.0 is ready")
        server.follow("hostile:1.0 is ready")
        server.follow("limited:1.0 is ready")
        server.follow("loading broken failed")
        opened.write("//input[@id='key']", "wrong")
        opened.click("//form[@id='key-form']//button")
        assert "The key was refused" in opened.text("//p[@id='told'][contains(., 'refused')]")
        key = json.loads((server.folder / "key_file.json").read_text())["inference"]["key"]
        opened.write("//input[@id='key']", key)
        opened.click("//form[@id='key-form']//button")
        yield opened


def test_a_browser_gets_the_page_without_a_key_and_others_what_torchserve_answers(server: Any) -> None:
    found = server.call("GET", "/", headers=HTML)
    assert found.status == 200 and b"<title>torchere</title>" in found.body
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        assert server.call("GET", "/", headers=headers).json()["type"] == "MethodNotAllowedException"
    assert server.call("POST", "/", b"", headers=HTML).json()["type"] == "MethodNotAllowedException"
    assert server.call("GET", "/", api="management", headers=HTML).status == 405


def test_the_page_asks_no_other_host_and_tells_nothing_of_the_models(server: Any) -> None:
    text = server.call("GET", "/", headers=HTML).body.decode()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text) and "odds" not in text
    assert "innerHTML" not in text and "document.write" not in text and "localStorage" not in text


def test_a_model_is_tried_with_a_form_made_of_its_signature(window: Browser, tmp_path: Path) -> None:
    article = "//article[.//h3='odds']"
    assert window.text(f"{article}//div").split("\n") == ["odds", "ready", "version 1.0"]
    assert window.text(f"{article}//tbody/tr") == "input FP32 [-1, 2]"
    window.write(f"{article}//textarea", "[[1.0, 1.0], [0, 0]]")
    window.click(f"{article}//button")
    assert window.text(f"{article}//form//p[starts-with(., '200')]")
    answer = json.loads(window.text(f"{article}//pre"))
    assert answer["outputs"][0]["data"] == [0.5, 0.5, 0.5, 0.5]
    window.write(f"{article}//textarea", "[[1.0,")
    window.click(f"{article}//button")
    assert "is not JSON" in window.text(f"{article}//form//p[contains(., 'JSON')]")


def test_the_form_begins_with_an_example_that_the_model_takes(server: Any, window: Browser) -> None:
    article = "//article[.//h3='limited']"
    assert window.text(f"{article}//tbody/tr[1]") == "x FP32 [-1, 4 to 512, 2]"
    assert window.text(f"{article}//tbody/tr[2]") == "ids INT64, 1 to 9 [1 to 64, 4 or more in steps of 2]"
    server.follow("To call limited")
    log = (server.folder / "server.log").read_text().splitlines()
    words = shlex.split(next(json.loads(line)["message"] for line in log if "To call limited" in line))
    for name, example in json.loads(words[words.index("--json") + 1]).items():
        assert json.loads(window.value(f"{article}//label[.='{name}']/following::textarea[1]")) == example
    window.click(f"{article}//button")
    assert window.text(f"{article}//form//p[starts-with(., '200')]")
    assert json.loads(window.text(f"{article}//pre"))["outputs"][0]["data"] == [4.0]


def test_of_a_model_that_failed_it_is_told_where_the_cause_is(window: Browser) -> None:
    assert window.text("//article[.//h3='broken']//div").split("\n")[1] == (
        "not ready: broken:1.0 is failed: GET /models/broken on the management port, or the server's log, "
        "says why"
    )


def test_names_that_are_markup_are_shown_as_text(window: Browser) -> None:
    article = "//article[.//h3='hostile']"
    assert HOSTILE in window.text(f"{article}//tbody/tr")
    assert window.run("return document.title") == "torchere"
    assert window.run("return document.querySelectorAll('article img').length") == 0


def test_the_operations_of_the_api_are_listed(window: Browser) -> None:
    window.click("//summary[code='/predictions/{model_name}']")
    assert "model_name in the path, string, required" in window.text(
        "//details[summary/code='/predictions/{model_name}']//ul"
    )


def test_every_field_has_a_label_and_the_policy_is_kept(window: Browser) -> None:
    unnamed = "[...document.querySelectorAll('input,select,textarea')].filter((e) => !e.labels.length).length"
    assert window.run(f"return {unnamed}") == 0
    assert [line for line in window.complaints() if "Failed to load resource" not in line] == []
