"""`torchere sign` and `torchere verify`."""

import errno
import os
import zipfile
from pathlib import Path

import pytest
from signers import Authority, key_pair, pack

from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.commands import cli
from torchere.serving.store.signing import SigningUnusable, SignWith


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive in the current directory."""
    monkeypatch.chdir(tmp_path)
    pack(tmp_path / "m.mar")


def test_an_archive_is_signed_with_a_key_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_pair(tmp_path)
    assert cli.main(["sign", "m.mar", "--key", "signing.pem"]) == 0
    assert cli.main(["verify", "m.mar", "--trust", "signing.pub"]) == 0
    signed, verified = capsys.readouterr().out.splitlines()
    assert signed == "m.mar.sig"
    assert verified.startswith("m.mar: signed by key sha256:")


def test_an_archive_is_signed_with_a_certificate_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = Authority(tmp_path).issue("release")
    key, certificate = str(means.key), str(means.certificate)
    assert cli.main(["sign", "m.mar", "--key", key, "--certificate", certificate]) == 0
    assert cli.main(["verify", "m.mar", "--trust", "ca.crt"]) == 0
    assert capsys.readouterr().out.endswith("m.mar: signed by certificate CN=release\n")


def test_the_password_of_a_key_comes_from_a_file(tmp_path: Path) -> None:
    key_pair(tmp_path, password=b"secret")
    (tmp_path / "password").write_text("secret\n")
    assert cli.main(["sign", "m.mar", "--key", "signing.pem", "--password-file", "password"]) == 0
    assert cli.main(["verify", "m.mar", "--trust", "signing.pub"]) == 0


def test_a_signature_that_is_not_valid_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = key_pair(tmp_path)
    pair.sign(tmp_path / "m.mar")
    pack(tmp_path / "m.mar", code="import os\n")
    assert cli.main(["verify", "m.mar", "--trust", "signing.pub"]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("The archive has no valid signature of a trusted signer. Signature mismatch")
    assert found.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_an_archive_that_was_changed_after_packing_is_not_signed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = key_pair(tmp_path)
    (tmp_path / "h.py").write_text("def handle(data, context): return data\n")
    made = write_archive(ArchiveRequest(model_name="n", version="1.0", handler="h.py"))
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("models/1.bin", "weights")
    assert cli.main(["sign", "n.mar", "--key", str(pair.private)]) == 1
    assert "entry 'models/1.bin': it is not in the manifest's list of digests" in capsys.readouterr().err
    assert not (tmp_path / "n.mar.sig").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sign", "none.mar", "--key", "signing.pem"], "The archive can't be used: none.mar: No such file"),
        (["sign", "m.mar", "--key", "none.pem"], "m.mar can't be signed. [Errno 2] No such file"),
        (["sign", "m.mar", "--key", "signing.pub"], "m.mar can't be signed."),
        (["sign", "m.mar", "--key", "a", "--password-file", "none"], "none can't be read."),
        (["sign", "m.mar", "--sigstore", "--password-file", "a"], "--password-file is for --key"),
        (["sign", "m.mar", "--sigstore", "--certificate", "a"], "--certificate needs --key"),
        (["sign", "m.mar", "--key", "a", "--chain", "b"], "--certificate needs --key, and --chain needs"),
        (["verify", "m.mar", "--trust", "none.pem"], "A trusted signing key can't be used. none.pem: "),
        (["verify", "m.mar", "--identity", "a@b"], "--identity needs --issuer."),
    ],
)
def test_wrong_use_is_said_in_one_line(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_pair(tmp_path)
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(text)
    assert error.count("\n") == 1
    assert not (tmp_path / "m.mar.sig").exists()


def test_a_read_only_store_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    key_pair(tmp_path)
    monkeypatch.setattr(os, "replace", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert cli.main(["sign", "m.mar", "--key", "signing.pem"]) == 1
    error = capsys.readouterr().err
    assert error == f"m.mar can't be signed. [Errno {errno.EROFS}] Read-only file system\n"


def test_sigstore_gets_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What Sigstore itself does is not tested: it needs a network."""
    taken: dict[str, object] = {}

    def without_network(self: SignWith) -> None:
        taken.update(vars_of(self))
        raise SigningUnusable("no network")

    def vars_of(means: SignWith) -> dict[str, object]:
        return {
            name: getattr(means, name) for name in ("ambient", "identity_token", "staging", "trust_config")
        }

    monkeypatch.setattr(SignWith, "config", without_network)
    (tmp_path / "token").write_text("abc\n")
    options = ["--identity-token", "token", "--staging", "--trust-config", "trust.json", "--ambient"]
    assert cli.main(["sign", "m.mar", "--sigstore", *options]) == 1
    assert taken == {
        "ambient": True,
        "identity_token": "abc",
        "staging": True,
        "trust_config": Path("trust.json"),
    }
