"""`torchere predict --grpc` over TLS, against grpcio's own server."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import EncodeError

from torchere.client import ConnectionFailed
from torchere.serving.commands.cli import main
from torchere.serving.commands.predict_grpc import Connection
from torchere.serving.frontend.grpc.protos import inference_pb2


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for this machine that nobody has signed; its key is beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "certificate.pem").write_bytes(made.public_bytes(pem))
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return tmp_path / "certificate.pem"


@pytest.fixture
def server(certificate: Path) -> Iterator[str]:
    """Answers each prediction with the name of the model; gives host:port."""
    key = (certificate.parent / "key.pem").read_bytes()
    method = grpc.unary_unary_rpc_method_handler(
        lambda request, _context: inference_pb2.PredictionResponse(prediction=request.model_name.encode()),
        request_deserializer=inference_pb2.PredictionsRequest.FromString,
        response_serializer=inference_pb2.PredictionResponse.SerializeToString,
    )
    service: Any = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
    with ThreadPoolExecutor(1) as pool:
        made = grpc.server(pool)
        made.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"Predictions": method})]
        )
        credentials = grpc.ssl_server_credentials([(key, certificate.read_bytes())])
        port = made.add_secure_port("127.0.0.1:0", credentials)
        made.start()
        yield f"127.0.0.1:{port}"
        made.stop(None).wait()


def test_a_certificate_of_ones_own_is_trusted_when_it_is_named(
    server: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Connection(f"https://{server}", None, 20) as connection:
        assert connection.predict("net", b"").body == b"net"


def test_a_server_of_this_machine_is_called_without_the_proxy(
    server: str, certificate: Path, monkeypatch: pytest.MonkeyPatch, proxy: socket.socket
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Connection(f"https://{server}", None, 5) as connection:
        assert connection.predict("net", b"").body == b"net"
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_a_certificate_that_nobody_signed_is_not_trusted(server: str) -> None:
    with Connection(f"https://{server}", None, 20) as connection, pytest.raises(ConnectionFailed):
        connection.predict("net", b"")


@pytest.mark.parametrize("file", ["none.pem", "empty.pem"])
def test_certificates_that_can_not_be_loaded_are_named(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / file))
    with pytest.raises(ValueError, match=f"^SSL_CERT_FILE is .*/{file}: "):
        Connection("https://127.0.0.1:1", None, 20)


def test_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="expected host:port, or https://host:port"):
        Connection("http://127.0.0.1:7070", None, 20)


def test_a_request_that_cannot_be_encoded_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Large:
        def __init__(self, **_: object) -> None:
            pass

        def SerializeToString(self) -> bytes:
            raise EncodeError("Failed to serialize proto")

    monkeypatch.setattr(inference_pb2, "PredictionsRequest", Large)
    assert main(["predict", "net", "--text", "x", "--grpc", "--address", "127.0.0.1:1"]) == 2
    error = "the request is larger than 2 GiB, or does not fit into memory"
    assert capfd.readouterr().err == f"torchere predict: {error}\n"
