"""Signatures of archives: which are accepted, and each way in which one is not."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from signers import Authority, KeyPair, key_pair, pack

from torchere.archiver.reader import ArchiveLimits, open_archive
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.errors import UntrustedArchive
from torchere.serving.store.signing import (
    MAX_SIGNATURE_BYTES,
    SigningUnusable,
    SignWith,
    Trust,
    TrustedKeys,
    sign,
    signature_url,
    verified_copy,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return key_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return pack(tmp_path / "m.mar")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unpacked archive, with digests in its manifest."""
    (tmp_path / "h.py").write_text("def handle(data, context): return data\n")
    (tmp_path / "words.txt").write_text("one\n")
    (tmp_path / "packed").mkdir()
    request = ArchiveRequest(
        model_name="m",
        version="1.0",
        handler=str(tmp_path / "h.py"),
        extra_files=(str(tmp_path / "words.txt"),),
        export_path=str(tmp_path / "packed"),
    )
    return open_archive(write_archive(request)).extract(tmp_path / "m")


def signer_of(path: Path, trust: Trust) -> str:
    """Verify as a server does."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        return verified_copy(open_archive(path), ArchiveLimits(), trust, Path(folder))[1]


def refusal(path: Path, trust: Trust) -> str:
    """Return the reason for which an archive is refused."""
    with pytest.raises(
        UntrustedArchive, match="The archive has no valid signature of a trusted sig"
    ) as caught:
        signer_of(path, trust)
    return caught.value.detail


def fingerprint(public: Path) -> str:
    key = serialization.load_pem_public_key(public.read_bytes())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def test_an_archive_signed_with_a_trusted_key_is_accepted_and_the_key_is_named(
    archive: Path, keys: KeyPair, tmp_path: Path
) -> None:
    assert keys.sign(archive) == tmp_path / "m.mar.sig"
    other = key_pair(tmp_path, "other")
    trust = TrustedKeys([other.public, keys.public])
    assert signer_of(archive, trust) == f"key sha256:{fingerprint(keys.public)}"


def test_a_certificate_of_a_trusted_authority_is_accepted_and_its_subject_is_named(
    archive: Path, authority: Authority, keys: KeyPair
) -> None:
    sign(open_archive(archive), authority.issue("release pipeline"))
    trust = TrustedKeys([keys.public, authority.file])
    assert signer_of(archive, trust) == "certificate CN=release pipeline"


def test_a_subject_with_line_feeds_does_not_break_the_log(archive: Path, authority: Authority) -> None:
    sign(open_archive(archive), authority.issue("release\nforged line"))
    assert signer_of(archive, TrustedKeys([authority.file])) == "certificate CN=release\\nforged line"


def test_a_key_that_needs_a_password_signs_with_it_alone(archive: Path, tmp_path: Path) -> None:
    pair = key_pair(tmp_path, password=b"secret")
    for wrong in (None, "wrong"):
        with pytest.raises(SigningUnusable, match=r"m\.mar can't be signed"):
            sign(open_archive(archive), SignWith(key=pair.private, password=wrong))
        assert sorted(path.name for path in tmp_path.glob("*m.mar*")) == ["m.mar"]
    sign(open_archive(archive), SignWith(key=pair.private, password="secret"))
    assert signer_of(archive, TrustedKeys([pair.public])).startswith("key sha256:")


def test_keys_of_another_kind_are_refused_and_named(
    archive: Path, tmp_path: Path, authority: Authority
) -> None:
    private, public = tmp_path / "rsa.pem", tmp_path / "rsa.pub"
    key = rsa.generate_private_key(65537, 2048)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, form))
    issued = authority.issue("release pipeline")
    reason = "it is an RSA key, not an elliptic-curve key (P-256, P-384, P-521)"
    for means in (SignWith(key=private), replace(issued, key=private)):
        with pytest.raises(SigningUnusable) as caught:
            sign(open_archive(archive), means)
        assert caught.value.detail == reason
    with pytest.raises(SigningUnusable) as caught:
        TrustedKeys([public])
    assert caught.value.detail.startswith(f"{public}: {reason}; expected PEM")


def test_a_folder_has_its_signature_in_it(folder: Path, keys: KeyPair) -> None:
    assert keys.sign(folder) == folder / "model.sig"
    assert keys.sign(folder) == folder / "model.sig"  # again: it does not sign the old signature
    assert signer_of(folder, TrustedKeys([keys.public])).startswith("key sha256:")


def test_a_folder_in_a_folder_has_it_where_its_files_are(folder: Path, keys: KeyPair) -> None:
    outer = folder.parent / "outer"
    outer.mkdir()
    folder.rename(outer / "m")
    assert keys.sign(outer) == outer / "m" / "model.sig"
    assert signer_of(outer, TrustedKeys([keys.public])).startswith("key sha256:")


def test_a_link_to_a_file_of_the_folder_is_signed_as_that_file(folder: Path, keys: KeyPair) -> None:
    (folder / "MAR-INF/MANIFEST.json").write_text(
        '{"runtime": "python", "model": {"modelName": "m", "handler": "h.py"}}'
    )
    (folder / "link.txt").symlink_to("words.txt")
    keys.sign(folder)
    assert signer_of(folder, TrustedKeys([keys.public])).startswith("key sha256:")
    (folder / "link.txt").unlink()
    (folder / "link.txt").symlink_to("h.py")
    assert "Signature mismatch" in refusal(folder, TrustedKeys([keys.public]))


def test_the_copy_of_a_folder_with_links_has_their_bytes_once(
    folder: Path, keys: KeyPair, tmp_path: Path
) -> None:
    manifest = folder / "MAR-INF/MANIFEST.json"
    manifest.write_text('{"runtime": "python", "model": {"modelName": "m", "handler": "h.py"}}')
    (folder / "link.txt").symlink_to("words.txt")
    keys.sign(folder)
    (tmp_path / "work").mkdir()
    trust = TrustedKeys([keys.public])
    copy, _ = verified_copy(open_archive(folder), ArchiveLimits(), trust, tmp_path / "work")
    unpacked = copy.extract(tmp_path / "unpacked")
    assert (unpacked / "link.txt").samefile(unpacked / "words.txt")


def test_what_python_writes_into_a_folder_is_not_part_of_it(folder: Path, keys: KeyPair) -> None:
    for name in ("__pycache__", "more"):
        (folder / name / "__pycache__").mkdir(parents=True)
        (folder / name / "__pycache__" / "h.pyc").write_bytes(b"before")
    keys.sign(folder)
    (folder / "__pycache__" / "h.pyc").write_bytes(b"after")
    assert signer_of(folder, TrustedKeys([keys.public])).startswith("key sha256:")


def test_an_archive_without_a_signature_is_refused(archive: Path, folder: Path, keys: KeyPair) -> None:
    trust = TrustedKeys([keys.public])
    assert f"there is no signature at {archive}.sig; `torchere sign` writes it" in refusal(archive, trust)
    assert f"there is no signature at {folder}/model.sig" in refusal(folder, trust)


def test_an_archive_that_was_changed_is_refused(archive: Path, keys: KeyPair) -> None:
    keys.sign(archive)
    pack(archive, code="import os\n")
    assert "Signature mismatch" in refusal(archive, TrustedKeys([keys.public]))


@pytest.mark.parametrize("change", ["changed", "removed", "added", "added .gitignore"])
def test_a_folder_that_was_changed_is_refused(change: str, folder: Path, keys: KeyPair) -> None:
    manifest = json.loads((folder / "MAR-INF/MANIFEST.json").read_text())
    del manifest["torchere"]  # its digests would refuse it first
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    keys.sign(folder)
    if change == "changed":
        (folder / "words.txt").write_text("two\n")
    elif change == "removed":
        (folder / "words.txt").unlink()
    else:
        (folder / (change.partition(" ")[2] or "sitecustomize.py")).write_text("import os\n")
    reason = refusal(folder, TrustedKeys([keys.public]))
    expected = "does not cover the file '.gitignore'" if "git" in change else "Signature mismatch"
    assert expected in reason


def test_a_folder_with_files_that_the_library_does_not_sign_can_not_be_signed(
    folder: Path, keys: KeyPair
) -> None:
    (folder / ".gitignore").write_text("*.pyc\n")
    manifest = folder / "MAR-INF/MANIFEST.json"
    manifest.write_text(json.dumps({"runtime": "python", "model": {"modelName": "m", "handler": "h.py"}}))
    with pytest.raises(UntrustedArchive) as caught:
        keys.sign(folder)
    assert "does not cover the file '.gitignore'" in caught.value.detail
    assert not (folder / "model.sig").exists()


def test_a_signature_by_the_command_of_the_library_is_accepted(folder: Path, keys: KeyPair) -> None:
    command = [sys.executable, "-m", "model_signing", "sign", "key", str(folder)]
    options = ["--private_key", str(keys.private), "--signature", str(folder / "model.sig")]
    subprocess.run([*command, *options], check=True, capture_output=True)
    assert signer_of(folder, TrustedKeys([keys.public])).startswith("key sha256:")


def test_a_signature_of_parts_of_a_file_is_refused(archive: Path, keys: KeyPair) -> None:
    from model_signing import hashing, signing  # takes a second, also of a process that runs other tests

    shards = hashing.Config().use_shard_serialization(shard_size=100)
    config = signing.Config().use_elliptic_key_signer(private_key=keys.private).set_hashing_config(shards)
    config.sign(archive, f"{archive}.sig")
    assert "it lists no whole files" in refusal(archive, TrustedKeys([keys.public]))


def test_a_signature_of_a_stranger_is_refused(
    archive: Path, keys: KeyPair, authority: Authority, tmp_path: Path
) -> None:
    stranger = key_pair(tmp_path, "stranger")
    stranger.sign(archive)
    assert "a key that is not trusted" in refusal(archive, TrustedKeys([keys.public, authority.file]))
    strange = Authority(tmp_path, "strange")
    sign(open_archive(archive), strange.issue("release pipeline"))
    assert "self-signed certificate" in refusal(archive, TrustedKeys([authority.file]))
    assert "no authority (CA) is trusted" in refusal(archive, TrustedKeys([keys.public]))


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")  # of the library
def test_a_certificate_that_is_not_for_signatures_is_refused(archive: Path, authority: Authority) -> None:
    sign(open_archive(archive), authority.issue("web site", signs=False))
    assert "cannot be used for signing" in refusal(archive, TrustedKeys([authority.file]))


def test_a_certificate_that_has_expired_is_accepted_as_the_document_says(
    archive: Path, authority: Authority
) -> None:
    """The library checks a certificate at the time at which it becomes valid."""
    sign(open_archive(archive), authority.issue("of yesterday", expired=True))
    assert signer_of(archive, TrustedKeys([authority.file])) == "certificate CN=of yesterday"


def altered(signature: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the bundle of a signature."""
    bundle = json.loads(signature.read_text())
    change(bundle)
    signature.write_text(json.dumps(bundle))


def with_payload(bundle: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> str:
    """Return the payload of a bundle, changed."""
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement)
    return base64.b64encode(json.dumps(statement).encode()).decode()


def test_a_signed_list_that_was_changed_is_refused(archive: Path, keys: KeyPair) -> None:
    keys.sign(archive)
    pack(archive, code="import os\n")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()

    def forge(statement: dict[str, Any]) -> None:
        statement["predicate"]["resources"][0]["digest"] = digest
        total = hashlib.sha256(bytes.fromhex(digest)).hexdigest()
        statement["subject"][0]["digest"]["sha256"] = total

    def change(bundle: dict[str, Any]) -> None:
        bundle["dsseEnvelope"]["payload"] = with_payload(bundle, forge)

    altered(archive.with_name("m.mar.sig"), change)
    assert "its signature is invalid" in refusal(archive, TrustedKeys([keys.public]))


def test_a_second_list_by_another_spelling_is_not_read(folder: Path, keys: KeyPair) -> None:
    (folder / "MAR-INF/MANIFEST.json").write_text('{"runtime": "python", "model": {"modelName": "m"}}')
    keys.sign(folder)
    (folder / ".gitignore").write_text("")

    def add(statement: dict[str, Any]) -> None:
        statement["predicate"]["resources"].append({"name": ".gitignore"})

    def change(bundle: dict[str, Any]) -> None:
        bundle["dsse_envelope"] = dict(bundle["dsseEnvelope"])
        bundle["dsseEnvelope"]["payload"] = with_payload(bundle, add)

    altered(folder / "model.sig", change)
    assert "its signature is invalid" in refusal(folder, TrustedKeys([keys.public]))


def test_a_signature_that_covers_nothing_is_refused(archive: Path, keys: KeyPair) -> None:
    """The library finds nothing to compare in a model whose signer left out the file itself."""
    from model_signing import hashing, signing

    none = hashing.Config().set_ignored_paths(paths=["."])
    config = signing.Config().use_elliptic_key_signer(private_key=keys.private).set_hashing_config(none)
    config.sign(archive, f"{archive}.sig")
    assert "does not cover the file '.'" in refusal(archive, TrustedKeys([keys.public]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"mediaType": 1, "verificationMaterial": [], "dsseEnvelope": null}',
        b'{"mediaType": "", "verificationMaterial": {"x509CertificateChain": {"certificates": []}}, '
        b'"dsseEnvelope": {"payload": "", "payloadType": "", "signatures": []}}',
        b"[" * 100_000,
        b"[" + b" " * MAX_SIGNATURE_BYTES,
    ],
)
def test_what_is_no_signature_is_refused(content: bytes, archive: Path, keys: KeyPair) -> None:
    archive.with_name("m.mar.sig").write_bytes(content)
    assert "its signature" in refusal(archive, TrustedKeys([keys.public]))


def test_a_signature_that_is_no_file_is_refused_and_not_waited_for(archive: Path, keys: KeyPair) -> None:
    os.mkfifo(f"{archive}.sig")
    assert "its signature can't be read" in refusal(archive, TrustedKeys([keys.public]))


def test_trust_in_nothing_and_in_unusable_files_is_refused(tmp_path: Path, keys: KeyPair) -> None:
    with pytest.raises(SigningUnusable) as nothing:
        TrustedKeys([])
    assert nothing.value.detail == "set trusted_signing_keys to PEM files"
    empty, two = tmp_path / "empty.pem", tmp_path / "two.pem"
    empty.touch()
    two.write_bytes(keys.public.read_bytes() * 2)
    for file, reason in (
        (tmp_path / "missing.pem", "No such file or directory"),
        (empty, "no public key and no certificate"),
        (two, "or several keys"),
        (keys.private, "it holds a private key"),
    ):
        with pytest.raises(SigningUnusable) as caught:
            TrustedKeys([keys.public, file])
        assert str(file) in caught.value.detail
        assert reason in caught.value.detail


def test_a_trusted_key_can_be_replaced(archive: Path, keys: KeyPair, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pub"
    trusted.write_bytes(key_pair(tmp_path, "old").public.read_bytes())
    trust = TrustedKeys([trusted])
    keys.sign(archive)
    assert "not trusted" in refusal(archive, trust)
    trusted.write_bytes(keys.public.read_bytes())
    assert signer_of(archive, trust).startswith("key sha256:")


def test_without_the_library_signing_says_how_to_install_it(
    archive: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for call in (lambda: keys.sign(archive), lambda: TrustedKeys([keys.public])):
        with pytest.raises(SigningUnusable) as caught:
            call()
        assert "pip install 'torchere[signing]'" in caught.value.detail


def test_the_signature_of_a_url_is_at_its_path_and_not_behind_its_query() -> None:
    assert signature_url("s3://bucket/net.mar") == "s3://bucket/net.mar.sig"
    assert signature_url("https://host/net.mar?a=b.mar&c") == "https://host/net.mar.sig?a=b.mar&c"
