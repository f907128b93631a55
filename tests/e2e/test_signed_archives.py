"""A server that requires signatures: every way by which an archive comes in leads past the verification."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from servers import PROPERTIES, RunningServer
from signers import Authority, KeyPair, key_pair, pack

from torchere.archiver.reader import open_archive
from torchere.serving.frontend.grpc.protos import management_pb2
from torchere.serving.store.signing import sign

REFUSED = "The archive has no valid signature of a trusted signer."
ECHO = "def handle(data, context):\n    return None if data is None else ['served'] * len(data)\n"
REGISTER = "/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return key_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that file URLs may name."""
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def required(keys: KeyPair, authority: Authority, shop: Path) -> str:
    """The settings of a server that requires signatures."""
    trusted = f"{keys.public},{authority.file}"
    return f"require_signed=true\ntrusted_signing_keys={trusted}\nallowed_urls=file://{shop}/.*\n"


@pytest.fixture(scope="module")
def server(start_server: Any, store: Path, keys: KeyPair, required: str) -> RunningServer:
    """Serves the whole store, where one archive is signed and one is not."""
    keys.sign(archive(store, "early"))
    archive(store, "unsigned")
    started: RunningServer = start_server(
        "--disable-token-auth", "--enable-model-api", "--models", "all", properties=required
    )
    return started


def archive(folder: Path, name: str) -> Path:
    return pack(folder / f"{name}.mar", ECHO, name)


def management(server: RunningServer, path: str, method: str = "GET") -> Any:
    return server.call(method, path, b"{}" if method == "POST" else None, api="management")


def test_at_the_start_an_unsigned_archive_is_logged_and_skipped(server: RunningServer) -> None:
    assert [each["modelName"] for each in management(server, "/models").json()["models"]] == ["early"]
    assert "Failed to load model: unsigned.mar: there is no signature at " in server.log()
    assert server.call("GET", "/predictions/early").body == b"served"


def test_the_signer_is_in_describe_and_in_the_log(
    server: RunningServer, store: Path, authority: Authority
) -> None:
    sign(open_archive(archive(store, "signed")), authority.issue("release"))
    assert server.register("signed.mar", initial_workers=1).status == 200
    (described,) = management(server, "/models/signed").json()
    assert described["torchere"]["signer"] == "certificate CN=release"
    assert "registered signed:1.0 from signed.mar, signed by certificate CN=release" in server.log()
    (early,) = management(server, "/models/early").json()
    assert early["torchere"]["signer"].startswith("key sha256:")


def test_an_archive_without_a_valid_signature_is_refused_by_every_call(
    server: RunningServer, store: Path, keys: KeyPair
) -> None:
    changed = archive(store, "changed")
    keys.sign(changed)
    pack(changed, "import os\n", "changed")
    folder = open_archive(archive(store, "packed")).extract(store / "folder")
    for name, reason in (
        ("unsigned.mar", "there is no signature at"),
        ("changed.mar", "Signature mismatch"),
        ("folder", "there is no signature at"),
    ):
        refused = server.register(name)
        assert (refused.status, refused.json()["type"]) == (400, "InvalidModelException")
        assert refused.json()["message"] == REFUSED
        assert reason in refused.json()["detail"]
        with grpc.insecure_channel(server.grpc["management"]) as channel:
            call = channel.unary_unary(
                REGISTER,
                request_serializer=management_pb2.RegisterModelRequest.SerializeToString,
                response_deserializer=management_pb2.ManagementResponse.FromString,
            )
            with pytest.raises(grpc.RpcError) as caught:
                call(management_pb2.RegisterModelRequest(url=name), timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(REFUSED)
    loaded = management(server, "/v2/repository/models/unsigned/load", "POST")
    assert (loaded.status, loaded.json()["error"]) == (400, REFUSED)
    keys.sign(folder)
    assert server.register("folder", model_name="folder", initial_workers=1).status == 200
    assert server.call("GET", "/predictions/folder").body == b"served"


def test_an_archive_from_a_url_needs_its_signature_there(
    server: RunningServer, store: Path, shop: Path, keys: KeyPair
) -> None:
    bought = archive(shop, "bought")
    refused = server.register(f"file://{bought}")
    assert (refused.status, refused.json()["type"]) == (400, "DownloadArchiveException")
    assert refused.json()["message"] == f"Failed to download archive from: file://{bought}.sig"
    assert "require_signed=true needs the signature of the archive there" in refused.json()["detail"]
    keys.sign(archive(shop, "other")).rename(f"{bought}.sig")
    refused = server.register(f"file://{bought}")
    assert (refused.status, refused.json()["message"]) == (400, REFUSED)
    assert not list(store.glob("bought*"))
    keys.sign(bought)
    assert server.register(f"file://{bought}", initial_workers=1).status == 200
    assert sorted(path.name for path in store.glob("bought*")) == ["bought.mar", "bought.mar.sig"]
    assert management(server, "/models/bought", "DELETE").status == 200
    assert not list(store.glob("bought*"))


def test_a_workflow_and_the_models_of_its_steps_need_signatures(
    server: RunningServer, store: Path, keys: KeyPair
) -> None:
    specification = "models:\n  echo:\n    url: step.mar\ndag:\n  first: [echo]\n"
    manifest = {"workflow": {"workflowName": "flow", "specFile": "flow.yaml", "handler": "f.py"}}
    flow, step = store / "flow.war", archive(store, "step")
    with zipfile.ZipFile(flow, "w") as file:
        file.writestr("flow.yaml", specification)
        file.writestr("f.py", "def first(data, context):\n    return data and [b'first'] * len(data)\n")
        file.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
    refused = management(server, "/workflows?url=flow.war", "POST")
    assert (refused.status, refused.json()["message"]) == (400, REFUSED)
    keys.sign(flow)
    refused = management(server, "/workflows?url=flow.war", "POST")
    assert refused.status == 500
    assert REFUSED in refused.json()["message"]
    keys.sign(step)
    assert management(server, "/workflows?url=flow.war", "POST").status == 200
    assert server.call("POST", "/wfpredict/flow", b"x").body == b"served"
    assert "registered flow__echo:1.0 from step.mar, signed by key sha256:" in server.log()


def test_a_snapshot_restores_an_archive_only_while_its_signature_is_there(
    start_server: Any, store: Path, keys: KeyPair, required: str
) -> None:
    kept, lost = (archive(store, name) for name in ("kept", "lost"))
    keys.sign(kept)
    keys.sign(lost).unlink()
    entry = {"defaultVersion": True, "minWorkers": 0, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    models = {path.stem: {"1.0": {**entry, "marName": path.name}} for path in (kept, lost)}
    snapshot = f"model_snapshot={json.dumps({'modelCount': 2, 'models': models})}\n"
    server = start_server("--disable-token-auth", properties=required + snapshot)
    assert [each["modelName"] for each in management(server, "/models").json()["models"]] == ["kept"]
    assert "Failed to load model: lost.mar: there is no signature at " in server.log()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("require_signed=true\n", "require_signed: no signer is trusted; set trusted_signing_keys"),
        (
            "require_signed=true\ntrusted_signing_keys=/no/such.pub\n",
            "A trusted signing key can't be used. /no/such.pub: [Errno 2] No such file or directory",
        ),
    ],
)
def test_a_start_without_a_usable_key_is_refused(
    settings: str, text: str, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.properties").write_text(PROPERTIES + settings)
    command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--disable-token-auth"]
    options = ["--model-store", str(store), "--ts-config", "config.properties"]
    ended = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert text in ended.stdout + ended.stderr
