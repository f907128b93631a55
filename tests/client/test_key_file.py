from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_transport import Call, Caller, Server

from torchere.client import AsyncClient, Client, ClientError
from torchere.client.key_file import find_key, is_loopback, read_key

KEYS = {
    "management": {"key": "m1", "expiration time": "2030-01-01T00:00:00.0Z"},
    "inference": {"key": "i1", "expiration time": "2030-01-01T00:00:00.0Z"},
    "API": {"key": "a1"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHERE_TOKEN", "TORCHERE_MANAGEMENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8080", "https://localhost", "[::1]:7070", "127.0.0.1:1"]
)
def test_a_key_file_in_the_current_folder_is_for_servers_of_this_machine(folder: Path, address: str) -> None:
    assert find_key(address, environ={}) is None
    (folder / "key_file.json").write_text(json.dumps(KEYS))
    found = find_key(address, environ={})
    assert found is not None
    assert (found.key, found.source) == ("i1", str(folder / "key_file.json"))
    assert found.expires == "2030-01-01T00:00:00.0Z"
    assert "i1" not in repr(found)


@pytest.mark.parametrize(
    "address", ["http://example.com", "10.0.0.1:7070", "http://127.0.0.1.example.com", "http://a@b"]
)
def test_no_other_server_gets_its_keys(folder: Path, address: str) -> None:
    (folder / "key_file.json").write_text(json.dumps(KEYS))
    assert find_key(address, environ={}) is None


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("http://evil.example?@localhost", False),
        ("http://evil.example#@localhost:8080", False),
        ("http://localhost@evil.example", False),
        ("http://[::1", False),
        ("http://u:p@LOCALHOST:8080/base?x", True),
    ],
)
def test_the_host_of_an_address_is_read_as_httpx_reads_it(address: str, is_here: bool) -> None:
    assert is_loopback(address) is is_here


def test_the_variable_of_the_role_counts_first(folder: Path) -> None:
    (folder / "key_file.json").write_text(json.dumps(KEYS))
    environ = {"TORCHERE_TOKEN": "t"}
    inference, management = (
        find_key("http://127.0.0.1", role, environ) for role in ("inference", "management")
    )
    assert inference is not None and management is not None
    assert (inference.key, inference.source, management.key) == ("t", "TORCHERE_TOKEN", "m1")
    assert find_key("http://example.com", environ=environ) == inference


def test_a_file_may_hold_the_key_alone(folder: Path) -> None:
    (folder / "key").write_text("word\n")
    assert read_key(folder / "key").key == "word"


@pytest.mark.parametrize("text", ["", "two words", "{", "{}", '{"inference": 1}', "[]", '{"inference": {}}'])
def test_a_file_without_a_key_is_named(folder: Path, text: str) -> None:
    (folder / "key").write_text(text)
    with pytest.raises(ValueError, match="key: no key found; expected one word, or "):
        read_key(folder / "key")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_clients_find_both_keys_and_send_none_if_told(folder: Path, kind: type[Client]) -> None:
    (folder / "key_file.json").write_text(json.dumps(KEYS))
    settings = kind()._settings
    assert (settings.key("inference"), settings.key("management")) == ("i1", "m1")
    settings = kind("http://example.com", token="k", management_token="")._settings
    assert (settings.key("inference"), settings.key("management")) == ("k", "")


def sent(call: Caller, ask: Call, **options: Any) -> str | None:
    """Return the header `authorization` of a call."""
    server = Server(httpx.Response(200, json=[]))
    call(server, ask, **options)
    token: str | None = server.requests[0].headers.get("authorization")
    return token


@pytest.mark.parametrize("text", ['{"inference": {"key": "i1"}}', "i1"])
def test_a_prediction_needs_no_key_of_the_management_api(folder: Path, call: Caller, text: str) -> None:
    (folder / "key_file.json").write_text(text)
    assert sent(call, lambda client: client.predict("net")) == "Bearer i1"


@pytest.mark.parametrize("text", ['{"inference": {"key": "i1"}}', '{"management": {"key": "two words"}}'])
def test_a_call_without_its_key_says_why(folder: Path, call: Caller, text: str) -> None:
    (folder / "key_file.json").write_text(text)
    with pytest.raises(ClientError, match=r"no key for the management API: .*expected"):
        sent(call, lambda client: client.describe("net"))


def test_a_key_file_of_another_user_is_read_only_for_a_call_that_needs_it(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied", "key_file.json")

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setenv("TORCHERE_TOKEN", "t")
    assert sent(call, lambda client: client.predict("net")) == "Bearer t"
    assert sent(call, lambda client: client.describe("net"), management_token="") is None
    with pytest.raises(ClientError, match=r"no key for the management API: .*denied"):
        sent(call, lambda client: client.describe("net"))


def test_a_key_is_looked_up_once(folder: Path) -> None:
    settings = Client()._settings
    assert settings.key("inference") == ""
    (folder / "key_file.json").write_text(json.dumps(KEYS))
    assert (settings.key("inference"), settings.key("management")) == ("", "m1")
