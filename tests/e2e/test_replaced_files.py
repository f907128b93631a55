"""Keys and certificates that are replaced under a running server."""

import json
import math
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXPIRY = "torchere_certificate_expiry_timestamp_seconds "
HANDLER = "def handle(data, context):\n    return None if data is None else ['ok'] * len(data)\n"


def write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.chmod(0o600)
    os.replace(draft, path)


def make_pair(folder: Path, days: int) -> str:
    """Put a new self-signed pair into the folder; returns the certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    command = f"openssl req -x509 {curve} -nodes -days {days} -subj /CN=localhost"
    draft = [*command.split(), "-keyout", "key.draft", "-out", "crt.draft"]
    subprocess.run(draft, cwd=folder, check=True, capture_output=True, timeout=60)
    for name in ("key", "crt"):
        os.replace(folder / f"{name}.draft", folder / f"tls.{name}")
    return (folder / "tls.crt").read_text()


def shown(address: str) -> str:
    """The certificate that a new connection gets."""
    host, port = address.rsplit(":", 1)
    return ssl.get_server_certificate((host, int(port)), timeout=20)


def test_new_keys_and_a_new_certificate_are_used_without_a_restart(
    start_server: Callable[..., Any], pack: Callable[..., str], store: Path
) -> None:
    pack("ok", {"h.py": HANDLER}, handler="h.py:handle")
    secrets = store.parent / "secrets"
    secrets.mkdir()
    write(secrets / "keys.json", json.dumps({"inference": "first-key"}))
    first = make_pair(secrets, days=1)
    server = start_server(
        *("--models", "ok.mar"),
        properties=f"token_keys_file={secrets}/keys.json\nenable_grpc_ssl=true\n"
        f"certificate_file={secrets}/tls.crt\nprivate_key_file={secrets}/tls.key\n",
    )
    server.follow("ok:1.0 is ready")

    def status(key: str) -> int:
        answer = server.call("POST", "/predictions/ok", b"x", authorization=f"Bearer {key}")
        return int(answer.status)

    def days_left() -> float:
        scrape = server.call("GET", "/metrics", api="metrics").body.decode()
        (line,) = (line for line in scrape.splitlines() if line.startswith(EXPIRY))
        return (float(line.split()[1]) - time.time()) / 86400

    assert (status("first-key"), status("second-key"), math.ceil(days_left())) == (200, 400, 1)
    assert shown(server.grpc["inference"]) == first
    write(secrets / "keys.json", json.dumps({"inference": ["second-key"]}))
    second = make_pair(secrets, days=2)
    server.follow("The token keys: read again")
    server.follow("The TLS certificate: read again")
    assert (status("first-key"), status("second-key"), math.ceil(days_left())) == (400, 200, 2)
    assert shown(server.grpc["inference"]) == second != first
    assert server.call("GET", "/token?type=inference", api="management").status == 405
    assert not list(server.folder.glob("key_file.json"))
    assert "second-key" not in server.log()
