"""Keys and certificates that sign archives; `pythonpath` of pytest leads here."""

import json
import zipfile
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from torchere.archiver.reader import open_archive
from torchere.serving.store.signing import SignWith, sign

PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class KeyPair:
    """A pair of elliptic keys in two files."""

    private: Path
    public: Path

    def sign(self, archive: Path) -> Path:
        return sign(open_archive(archive), SignWith(key=self.private))


def key_pair(folder: Path, name: str = "signing", password: bytes | None = None) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    pair = KeyPair(folder / f"{name}.pem", folder / f"{name}.pub")
    _write_private(key, pair.private, password)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pair.public.write_bytes(key.public_key().public_bytes(PEM, form))
    return pair


def _write_private(key: ec.EllipticCurvePrivateKey, path: Path, password: bytes | None = None) -> None:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption))


class Authority:
    """An authority (CA), with its certificate in a file, that issues certificates for signing."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.file = folder / f"{name}.crt"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._certificate(self._name, self._key.public_key(), is_ca=True, signs=True)
        self.file.write_bytes(certificate.public_bytes(PEM))

    def issue(self, subject: str, *, signs: bool = True, expired: bool = False) -> SignWith:
        """Issue a certificate, and return how to sign with it; `signs`: may be used for signatures."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        certificate = self._certificate(name, key.public_key(), is_ca=False, signs=signs, expired=expired)
        files = self.folder / f"{len(list(self.folder.iterdir()))}.pem", self.folder / "leaf.crt"
        _write_private(key, files[0])
        files[1].write_bytes(certificate.public_bytes(PEM))
        return SignWith(key=files[0], certificate=files[1], chain=(self.file,))

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        is_ca: bool,
        signs: bool,
        expired: bool = False,
    ) -> x509.Certificate:
        now = datetime.now(timezone.utc)
        usage = x509.KeyUsage(signs, False, not signs, False, False, is_ca, is_ca, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=2 if is_ca else 1))
            .not_valid_after(now - timedelta(minutes=1) if expired else now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )


def pack(path: Path, code: str = "def handle(data, context): return data\n", name: str = "m") -> Path:
    """Write an archive with one file of code."""
    model = {"modelName": name, "modelVersion": "1.0", "handler": "h.py"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("h.py", code)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    return path
