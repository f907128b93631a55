import shutil
import subprocess
from datetime import datetime, timezone

import pytest

from torchere.serving.access.tls import UnreadableCertificate, expiry_s


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """`make(days)`: a self-signed certificate in a PEM file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def certificate(days):
        folder = tmp_path_factory.mktemp("tls")
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x"]
        command += ["-days", str(days), "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
        subprocess.run(command, check=True, capture_output=True)
        return folder / "cert.pem"

    return certificate


@pytest.mark.parametrize("days", [10, 36_500])  # the latter has a time of the other kind
def test_the_end_of_a_certificate_is_told_as_openssl_tells_it(make, days):
    file = make(days)
    asked = subprocess.run(
        ["openssl", "x509", "-in", file, "-noout", "-enddate"], check=True, capture_output=True, text=True
    )
    end = datetime.strptime(asked.stdout.strip(), "notAfter=%b %d %H:%M:%S %Y GMT")
    assert expiry_s(file) == end.replace(tzinfo=timezone.utc).timestamp()


def test_of_a_chain_the_first_one_counts(make):
    first, second = make(10), make(20)
    expected = expiry_s(first)
    first.write_text(first.read_text() + second.read_text())
    assert expiry_s(first) == expected


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "No such file"),
        ("hello", "no BEGIN CERTIFICATE"),
        ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----", "broken"),
        ("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----", "broken"),
        ("-----BEGIN CERTIFICATE-----\nMIL//w==\n-----END CERTIFICATE-----", "broken"),
        ("-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----", "found the tag 0x02"),
    ],
)
def test_what_can_not_be_read_is_said(tmp_path, text, cause):
    file = tmp_path / "cert.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UnreadableCertificate, match=cause):
        expiry_s(file)
