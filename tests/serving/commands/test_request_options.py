"""The request that the options of `torchere predict` and `torchere bench` give."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import httpx
import pytest

from torchere.serving.commands.cli import main
from torchere.serving.commands.request_options import body_of, parsed


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my request.json").write_text("[1]")
    return "my request.json"


@pytest.mark.parametrize("prefix", ["", "@"])
def test_a_file_in_the_place_of_json_is_told_its_own_option(file: str, prefix: str) -> None:
    with pytest.raises(ValueError) as refusal:
        body_of(Namespace(json=prefix + file))
    assert str(refusal.value) == (
        f"--json {prefix}{file}: found the name of a file, expected JSON; did you mean "
        "--file 'my request.json'?"
    )
    with pytest.raises(ValueError, match=r"""did you mean --json "\$\(cat 'my request\.json'\)"\?$"""):
        parsed(prefix + file, arrays=True)


@pytest.mark.parametrize("text", ["other.json", "@", "", ".", "{" * 5000, "\0"])
def test_other_text_in_the_place_of_json_is_said_to_be_none(file: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"^--json is no JSON: "):
        parsed(text)
    assert parsed("[1]") == [1]


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and a server at every address that answers with the key of the request."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHERE_TOKEN", "TORCHERE_MANAGEMENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def answer(_transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=request.headers.get("authorization", "none"))

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)


@pytest.mark.parametrize(
    "more", [(), ("--token-file", "key_file.json", "--address", "http://example.invalid")]
)
@pytest.mark.parametrize("text", ['{"inference": {"key": "i1"}}', "i1"])
def test_a_key_file_with_the_inference_key_alone_will_do(
    echo: None, more: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("key_file.json").write_text(text)
    assert main(["predict", "net", "--json", "1", *more]) == 0
    assert capsys.readouterr().out == "Bearer i1\n"


def test_variables_of_a_proxy_that_httpx_refuses_are_named(
    echo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:1")
    assert main(["predict", "net", "--json", "1"]) == 0
    assert main(["predict", "net", "--json", "1", "--address", "http://example.invalid"]) == 2
    assert "torchere predict: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY: found" in capsys.readouterr().err
