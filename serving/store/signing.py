"""Signs archives and verifies signatures with OpenSSF Model Signing; the only module that knows its library.

The library (`model-signing`, the extra `signing`) writes a Sigstore bundle: a signed list of files with their
SHA-256. The signature of an archive file is `NAME.sig` beside it, that of a folder is `model.sig` inside it.
All calls block. The library takes 0.7 s to import, so it is imported by the first call that needs it.

Anyone who may write to the model store can change an archive between its verification and its unpacking, even
in place and with its timestamps restored. So `verified_copy` verifies a copy in a folder of this server
alone, which is then the only one that is read.
"""
# ruff: noqa: PLC0415 - the docstring has the reason

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchere.archiver.atomic import staged
from torchere.archiver.container.entries import open_regular
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import FOLDER_SIGNATURE, Archive, ArchiveLimits, open_archive
from torchere.serving.errors import ServingError, UntrustedArchive

if TYPE_CHECKING:
    from model_signing import signing, verifying

SIGNATURE_SUFFIX = ".sig"
MAX_SIGNATURE_BYTES = 4 << 20  # enough for a folder of 10,000 files with names of usual length
_COPIED_BYTES = 2**23  # at a time: each piece takes the GIL
_PREDICATE = "https://model_signing/signature/v1.0"
_THE_FILE_ITSELF = "."  # the library's name for a model that is a single file
_PREFIX_OF_OTHER_BYTES = "Signature mismatch"  # the library's text: the signature is good, the files differ
_INSTALL = "it needs the library of OpenSSF Model Signing: pip install 'torchere[signing]'"


class SigningUnusable(ServingError):
    """Signing or verifying is impossible: the library, a key or a certificate is missing or unusable."""

    code = "signing_unusable"


def signature_path(archive: Archive) -> Path:
    """Return the path of the signature of an archive."""
    root = archive.root
    return root / FOLDER_SIGNATURE if archive.kind == "directory" else signature_beside(root)


def signature_beside(file: Path) -> Path:
    """Return the path of the signature of an archive that is a file."""
    return file.with_name(file.name + SIGNATURE_SUFFIX)


def signature_url(url: str) -> str:
    """Return the URL of the signature of the archive at `url`.

    >>> signature_url("https://host/net.mar?version=2")
    'https://host/net.mar.sig?version=2'
    """
    path, mark, query = url.partition("?")
    return f"{path}{SIGNATURE_SUFFIX}{mark}{query}"


def read_signature(path: Path) -> bytes:
    """Read a signature file.

    Raises:
        UntrustedArchive: it is missing, not a regular file, or larger than `MAX_SIGNATURE_BYTES`.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_SIGNATURE_BYTES + 1)
    except FileNotFoundError as err:
        raise _untrusted(f"there is no signature at {path}; `torchere sign` writes it") from err
    except (OSError, ArchiveError) as err:
        raise _untrusted(f"its signature can't be read: {err}") from err
    if len(data) > MAX_SIGNATURE_BYTES:
        raise _untrusted(f"its signature {path} has more than {MAX_SIGNATURE_BYTES} bytes")
    return data


class Trust:
    """The signers that are trusted. Thread-safe."""

    def verify(self, model: Path, signature: bytes, used: AbstractSet[str], scratch: Path) -> str:
        """Hash all bytes of a model and return its signer.

        Args:
            model: an archive file, or a folder with the files of an archive, which no one else can change.
            signature: the content of its signature file.
            used: names of the files that the server will use; not needed for an archive file.
            scratch: a path for a temporary file.

        Raises:
            UntrustedArchive: the signature is invalid, by another signer, for other bytes, or does not cover
                all files in `used`.
            SigningUnusable: a key or certificate has become unusable.
        """
        bundle = _Bundle.parse(signature)
        scratch.write_bytes(bundle.text)
        try:
            signer = self._verified(model, scratch, bundle)
        finally:
            scratch.unlink()
        bundle.check_covers({_THE_FILE_ITSELF} if model.is_file() else used)
        return signer

    def _verified(self, model: Path, signature: Path, bundle: _Bundle) -> str:
        raise NotImplementedError


class TrustedKeys(Trust):
    """Trust in public keys, and in certificates of authorities (CA), from PEM files; works offline.

    Every verification reads the files again, so that an operator can replace them.

    Raises:
        SigningUnusable: no file is given, a file is unusable, or the library is not installed.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        if not files:
            raise SigningUnusable("No signing key is trusted.", "set trusted_signing_keys to PEM files")
        self._files = tuple(files)
        self._read()

    def _verified(self, model: Path, signature: Path, bundle: _Bundle) -> str:
        keys, authorities = self._read()
        if bundle.certificate is not None:
            if not authorities:  # the library would trust the authorities of web sites
                raise _untrusted("it was signed with a certificate, and no authority (CA) is trusted")
            _run(_verifying().use_certificate_verifier(certificate_chain=authorities), model, signature)
            return _subject_of(bundle.certificate)
        reason = "no key is trusted"
        for key in keys:
            try:
                _run(_verifying().use_elliptic_key_verifier(public_key=key), model, signature)
            except UntrustedArchive as err:
                if err.detail.startswith(_PREFIX_OF_OTHER_BYTES):
                    raise
                reason = err.detail
            else:
                return _fingerprint_of(key)
        raise _untrusted(f"its signature is invalid, or was made with a key that is not trusted: {reason}")

    def _read(self) -> tuple[list[Path], list[Path]]:
        """Check all files; return those with public keys, and those with certificates."""
        keys: list[Path] = []
        authorities: list[Path] = []
        for file in self._files:
            try:
                (authorities if _holds_certificates(file) else keys).append(file)
            except (OSError, ValueError, TypeError) as err:
                expected = "PEM with one public key (P-256, P-384 or P-521), or with certificates of a CA"
                raise SigningUnusable(
                    "A trusted signing key can't be used.", f"{file}: {err}; expected {expected}."
                ) from err
        return keys, authorities


@dataclass(frozen=True, slots=True)
class TrustedIdentity(Trust):
    """Trust in one identity of Sigstore's keyless signing; the library uses the network."""

    identity: str  # an e-mail address, or the URL of a CI workflow
    issuer: str  # URL of the OpenID Connect provider
    staging: bool = False
    trust_config: Path | None = None  # of a private Sigstore; None: the public one

    def _verified(self, model: Path, signature: Path, bundle: _Bundle) -> str:
        config = _verifying()
        try:
            config.use_sigstore_verifier(
                identity=self.identity,
                oidc_issuer=self.issuer,
                use_staging=self.staging,
                trust_config=self.trust_config,
            )
        except Exception as err:
            raise SigningUnusable("Sigstore can't be used.", _text_of(err)) from err
        _run(config, model, signature)
        return f"identity {self.identity} ({self.issuer})"


@dataclass(frozen=True, slots=True)
class SignWith:
    """The means of signing: a private key, a key with its certificate, or Sigstore (no `key`)."""

    key: Path | None = None  # PEM, elliptic curve
    password: str | None = None  # of the key; the library takes none with a certificate
    certificate: Path | None = None  # PEM
    chain: tuple[Path, ...] = ()  # PEM: intermediate certificates
    ambient: bool = False  # Sigstore: take the credentials of the CI job or machine
    identity_token: str | None = None  # Sigstore: an OpenID Connect token
    staging: bool = False
    trust_config: Path | None = None

    def config(self) -> signing.Config:
        """Return the configuration of the library."""
        config: signing.Config = _library().signing.Config()
        if self.key is None:
            return config.use_sigstore_signer(
                use_ambient_credentials=self.ambient,
                identity_token=self.identity_token,
                use_staging=self.staging,
                trust_config=self.trust_config,
            )
        if self.certificate is None:
            # The library annotates the password as `str`, but passes it to a function that takes only bytes.
            password: Any = self.password.encode() if self.password else None
            return config.use_elliptic_key_signer(private_key=self.key, password=password)
        # The library can't read an empty chain; the certificate itself adds nothing to it.
        chain = self.chain or (self.certificate,)
        return config.use_certificate_signer(
            private_key=self.key, signing_certificate=self.certificate, certificate_chain=chain
        )


def sign(archive: Archive, means: SignWith) -> Path:
    """Sign an archive and return the path of the signature, which replaces an earlier one.

    Raises:
        SigningUnusable: a key is unusable, Sigstore refuses, or the signature can't be written.
        UntrustedArchive: the folder has a file that the library does not sign.
    """
    root, target = archive.root, signature_path(archive)
    is_folder = archive.kind == "directory"
    # `__pycache__` is not part of an archive: see `FolderContainer`.
    skipped = [target, *root.rglob("__pycache__")] if is_folder else []
    try:
        # Links in a folder lead to its own files: `FolderContainer` refuses others.
        hashing = _library().hashing.Config().set_allow_symlinks(is_folder)
        hashing.set_ignored_paths(paths=[path.relative_to(root) for path in skipped])
        with _elliptic_keys():
            config = means.config()
        names = {entry.name for entry in archive.entries} - {FOLDER_SIGNATURE}
        with staged(target) as draft:
            config.set_hashing_config(hashing).sign(root, draft)
            _Bundle.parse(draft.read_bytes()).check_covers(names if is_folder else {_THE_FILE_ITSELF})
    except ServingError:
        raise
    except Exception as err:  # of the library, cryptography, OpenSSL, the disk, or Sigstore's transports
        raise SigningUnusable(f"{archive.path} can't be signed.", _text_of(err)) from err
    return target


def verified_copy(
    original: Archive, limits: ArchiveLimits, trust: Trust, folder: Path
) -> tuple[Archive, str]:
    """Copy an archive to an empty folder and verify the signature; return the open copy and its signer.

    Args:
        original: the archive, opened `as_packed`; its signature is beside it, or in it if it is a folder.
        limits: the limits of the archive.
        trust: the trusted signers.
        folder: only this process may write to it. The caller deletes it, also after an error.

    Raises:
        ArchiveError: the archive is invalid or can't be read.
        UntrustedArchive: the signature is missing, invalid or not trusted.
        SigningUnusable: a trusted key is unusable.
        OSError: the copy can't be written.
    """
    signature = read_signature(signature_path(original))  # before the copy, which may be large
    copy = folder / "copy" / original.path.name
    copy.parent.mkdir()
    if original.kind == "directory":
        original.extract(copy)
        (copy / FOLDER_SIGNATURE).unlink(missing_ok=True)
    else:
        _copy_file(original.path, copy)
    archive = open_archive(copy, limits, as_packed=True)
    used = {entry.name for entry in archive.entries}
    return archive, trust.verify(copy, signature, used, folder / "signature")


def _copy_file(source: Path, target: Path) -> None:
    """Copy as many bytes as the file has now: another process may append to it without end."""
    with open_regular(source) as file, target.open("xb") as copy:
        left = file.seek(0, 2)
        file.seek(0)
        while left and (piece := file.read(min(left, _COPIED_BYTES))):
            copy.write(piece)
            left -= len(piece)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A Sigstore bundle, reduced to the members that are known here.

    The library gets only `text`, so that it reads the same values as this module: it might accept another
    spelling of a member, too.
    """

    text: bytes
    certificate: bytes | None  # the signer's, DER; None: signed with a key, or by Sigstore
    names: frozenset[str]  # of the signed files; to be trusted once the signature is verified

    @classmethod
    def parse(cls, data: bytes) -> _Bundle:
        """Parse a signature file; raise UntrustedArchive if it is not a bundle of Model Signing."""
        try:
            whole = json.loads(data)
            envelope, material = whole["dsseEnvelope"], _material(whole["verificationMaterial"])
            known = {
                "mediaType": whole["mediaType"],
                "verificationMaterial": material,
                "dsseEnvelope": {name: envelope[name] for name in ("payload", "payloadType", "signatures")},
            }
            statement = json.loads(base64.b64decode(envelope["payload"]))
            if statement["predicateType"] != _PREDICATE:
                raise ValueError(f"a signature of type {statement['predicateType']!a}")
            chain = material.get("x509CertificateChain")
            certificate = base64.b64decode(chain["certificates"][0]["rawBytes"]) if chain else None
            return cls(json.dumps(known).encode(), certificate, _names(statement["predicate"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
            raise _untrusted(f"its signature is not one of Model Signing 1.0: {_text_of(err)}") from err

    def check_covers(self, used: AbstractSet[str]) -> None:
        """Raise UntrustedArchive unless all files are signed: the library leaves out `.git` and others."""
        if missing := sorted(used - self.names):
            raise _untrusted(f"its signature does not cover the file {missing[0]!a}; remove it")


def _material(material: Mapping[str, Any]) -> dict[str, Any]:
    members = ("publicKey", "certificate", "tlogEntries", "timestampVerificationData")
    known = {name: material[name] for name in members if name in material}
    if chain := material.get("x509CertificateChain"):
        certificates = [{"rawBytes": each["rawBytes"]} for each in chain["certificates"]]
        known["x509CertificateChain"] = {"certificates": certificates}
    return known


def _names(predicate: Mapping[str, Any]) -> frozenset[str]:
    if predicate["serialization"]["method"] != "files":  # the library 1.1.1 can't verify its own "shards"
        raise ValueError("it lists no whole files")
    return frozenset(resource["name"] for resource in predicate["resources"])


def _library() -> Any:
    """Import the library; raise SigningUnusable if it is not installed."""
    try:
        import model_signing
    except ImportError as err:
        raise SigningUnusable("Signatures can't be made or verified.", f"{_INSTALL} ({err})") from err
    return model_signing


def _verifying() -> verifying.Config:
    """Return a new configuration: a used one keeps the last signature's paths to ignore."""
    config: verifying.Config = _library().verifying.Config()
    return config


def _run(config: verifying.Config, model: Path, signature: Path) -> None:
    try:
        config.verify(model, signature)
    except Exception as err:  # of the library, cryptography, OpenSSL or Sigstore, for any malformed value
        raise _untrusted(_text_of(err)) from err


def _holds_certificates(file: Path) -> bool:
    """Return whether a trusted file has certificates, not a key.

    Raise OSError, ValueError or TypeError unless the library can use the file.
    """
    text = file.read_bytes()
    if b"-----BEGIN CERTIFICATE-----" in text:
        _verifying().use_certificate_verifier(certificate_chain=[file])
        return True
    if text.count(b"-----BEGIN PUBLIC KEY-----") == 1:
        with _elliptic_keys():
            _verifying().use_elliptic_key_verifier(public_key=file)
        return False
    if b"PRIVATE KEY-----" in text:
        raise ValueError("it holds a private key, which no server needs")
    raise ValueError("no public key and no certificate, or several keys, are in it")


@contextmanager
def _elliptic_keys() -> Iterator[None]:
    """Convert the library's error for a key of another kind, which it does not expect, to a ValueError."""
    try:
        yield
    except AttributeError as err:
        if err.name != "curve":
            raise
        found = type(err.obj).__name__.removesuffix("PublicKey")  # of cryptography: `RSAPublicKey`
        raise ValueError(f"it is an {found} key, not an elliptic-curve key (P-256, P-384, P-521)") from err


def _fingerprint_of(key: Path) -> str:
    """Return the SHA-256 of a public key in DER, as `openssl pkey -pubin -outform DER | sha256sum` does."""
    from cryptography.hazmat.primitives import serialization

    public = serialization.load_pem_public_key(key.read_bytes())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return f"key sha256:{hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()}"


def _subject_of(certificate: bytes) -> str:
    from cryptography import x509

    subject = x509.load_der_x509_certificate(certificate).subject.rfc4514_string()
    # A subject may have line feeds, and the text goes to the log.
    shown = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in subject)
    return f"certificate {''.join(shown)}"


def _text_of(err: Exception) -> str:
    return str(err) or type(err).__name__


def _untrusted(reason: str) -> UntrustedArchive:
    return UntrustedArchive("The archive has no valid signature of a trusted signer.", reason)
