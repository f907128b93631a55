"""Clients with certificates, of real CAs over real TLS: their identities, their roles, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import requests
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from google.protobuf import empty_pb2

from torchere.serving.access.fixed_keys import FixedKeys
from torchere.serving.access.tls import Certificates, CertificateUnusable, TlsFiles
from torchere.serving.config.server_settings import Address
from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2
from torchere.serving.frontend.grpc.server import inference_server, management_server
from torchere.serving.frontend.rest.server import RestServer, listener_of

PEM = serialization.Encoding.PEM
CLIENTS = {
    "identities": [
        {"identity": "ci", "roles": ["management"], "subject": "CN=ci,O=Example"},
        {"identity": "mesh", "roles": ["inference"], "subject": "URI:spiffe://example/app"},
        {"identity": "token", "roles": ["management"], "key": "management-key"},
    ]
}


class Authority:
    """A certificate authority that signs for the tests."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        ca = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs alone
        certificate = self._builder(self._name, self._key).add_extension(ca, critical=True)
        certificate = certificate.add_extension(usage, critical=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(PEM))

    def _builder(self, subject, key, until=None):
        """Begin a certificate; clients of Python 3.13 on want the identifiers of both keys."""
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(2020, 1, 1))
            .not_valid_after(until or datetime.datetime(2100, 1, 1))
            .add_extension(identifier, critical=False)
            .add_extension(issuer, critical=False)
        )

    def sign(self, name, *alternative, organization="", usage=ExtendedKeyUsageOID.CLIENT_AUTH, until=None):
        """Files of a new certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if organization:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        builder = self._builder(x509.Name(attributes), key, until)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if alternative:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternative), critical=False)
        files = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        files[0].write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        form, open_key = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        files[1].write_bytes(key.private_bytes(PEM, form, open_key))
        return files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Certificates of the server and of clients, by name, and the file of the clients' CA."""
    folder = tmp_path_factory.mktemp("certificates")
    own, other = Authority(folder, "our-ca"), Authority(folder, "other-ca")
    localhost = x509.DNSName("localhost")
    return SimpleNamespace(
        ca=own.file,
        server=own.sign("server", localhost, usage=ExtendedKeyUsageOID.SERVER_AUTH),
        nobody=None,
        ci=own.sign("ci", organization="Example"),
        app=own.sign("app", x509.UniformResourceIdentifier("spiffe://example/app")),
        unknown=own.sign("unknown"),
        foreign=other.sign("foreign", organization="Example"),
        expired=own.sign("expired", until=datetime.datetime(2021, 1, 1)),
    )


@pytest.fixture
def files(made, tmp_path):
    """The clients' file and the TLS files of a server."""
    clients = tmp_path / "clients.json"
    clients.write_text(json.dumps(CLIENTS))
    clients.chmod(0o600)
    certificate, key = made.server
    return SimpleNamespace(clients=clients, tls=TlsFiles(certificate, key, made.ca))


@contextlib.asynccontextmanager
async def serving(planes, files, surface, *, takes_tokens=True):
    """A REST server and a gRPC server of one API, with client certificates; yields their addresses."""
    keys = FixedKeys(files.clients, takes_tokens=takes_tokens)
    services = dataclasses.replace(
        planes.services(keys=keys, grpc_tls_enabled=True), certificates=Certificates(files.tls)
    )
    listener = listener_of(frozenset({surface}), planes.data, planes.control, services)
    address = Address("localhost", 0, tls=True)
    rest = RestServer(listener, address, drain_timeout_s=2, certificates=services.certificates)
    start = inference_server if surface == "inference" else management_server
    rpc = start(planes.data, planes.control, services, Address("localhost", 0))
    rest_address, rpc_address = await rest.start(), await rpc.start()
    try:
        yield SimpleNamespace(rest=rest_address, grpc=rpc_address, keys=keys)
    finally:
        await rest.stop()
        await rpc.stop(1)


def rest_status(made, address, path, client, *, method="GET", key=None):
    """Status of a call by `requests`; 0: the handshake failed."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    certificate = None if client == "nobody" else tuple(map(str, getattr(made, client)))
    url = f"https://localhost:{address.port}{path}"
    try:
        options: dict[str, Any] = {"verify": str(made.ca), "cert": certificate, "headers": headers}
        return requests.request(method, url, timeout=20, **options).status_code
    except requests.ConnectionError:
        return 0


async def grpc_code(made, address, method, request, client):
    """Name of the status code of a call by grpcio."""
    certificate, key = (None, None) if client == "nobody" else getattr(made, client)
    credentials = grpc.ssl_channel_credentials(
        made.ca.read_bytes(), key and key.read_bytes(), certificate and certificate.read_bytes()
    )
    async with grpc.aio.secure_channel(f"localhost:{address.port}", credentials) as channel:
        call: Any = channel.unary_unary(method, lambda message: message.SerializeToString(), bytes)
        try:
            await call(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine function on either event loop."""
    module = asyncio if request.param == "asyncio" else uvloop
    return lambda main: module.run(main())


@pytest.mark.parametrize(
    "case",
    [
        ("management", "/models", {"ci": 200, "app": 400, "unknown": 400, "nobody": 400}),
        ("inference", "/ping", {"ci": 400, "app": 200, "unknown": 400, "nobody": 400}),
        ("management", "/readyz", {"ci": 200, "unknown": 200, "nobody": 200}),
    ],
    ids=lambda case: case[1],
)
def test_a_certificate_opens_the_routes_of_its_roles(planes, files, made, run, case):
    surface, path, statuses = case

    async def main():
        async with serving(planes, files, surface, takes_tokens=False) as server:
            found = {
                client: await asyncio.to_thread(rest_status, made, server.rest, path, client)
                for client in statuses
            }
            assert found == statuses

    run(main)


@pytest.mark.parametrize("client", ["foreign", "expired"])
def test_a_certificate_of_another_ca_or_an_old_one_gets_no_connection(planes, files, made, client):
    async def main():
        async with serving(planes, files, "management") as server:
            assert await asyncio.to_thread(rest_status, made, server.rest, "/readyz", client) == 0
            method = "/grpc.health.v1.Health/Check"
            found = await grpc_code(made, server.grpc, method, empty_pb2.Empty(), client)
            assert found == "UNAVAILABLE"

    uvloop.run(main())


@pytest.mark.parametrize(
    "case",
    [
        (
            "management",
            "/org.pytorch.serve.grpc.management.ManagementAPIsService/ListModels",
            management_pb2.ListModelsRequest(),
            {"ci": "OK", "app": "PERMISSION_DENIED", "nobody": "PERMISSION_DENIED"},
        ),
        (
            "inference",
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
            inference_pb2.PredictionsRequest(model_name="echo", input={"data": b"x"}),
            {"app": "OK", "ci": "PERMISSION_DENIED", "unknown": "PERMISSION_DENIED"},
        ),
    ],
    ids=lambda case: case[0],
)
def test_a_certificate_opens_the_grpc_methods_of_its_roles(planes, files, made, run, case):
    surface, method, request, codes = case

    async def main():
        async with serving(planes, files, surface) as server:
            found = {client: await grpc_code(made, server.grpc, method, request, client) for client in codes}
            assert found == codes

    run(main)
    assert set(planes.data.callers) <= {"mesh"}


def test_a_certificate_that_expired_since_its_handshake_has_no_role_when_it_is_resumed(
    planes, files, made, monkeypatch
):
    """OpenSSL takes a resumed session without another look at its certificate."""
    method = "/org.pytorch.serve.grpc.management.ManagementAPIsService/ListModels"

    async def main():
        async with serving(planes, files, "management") as server:
            monkeypatch.setattr(time, "time", lambda: 4_200_000_000.0)  # 2103; OpenSSL has its own clock
            assert await asyncio.to_thread(rest_status, made, server.rest, "/models", "ci") == 400
            found = await grpc_code(made, server.grpc, method, management_pb2.ListModelsRequest(), "ci")
            assert found == "PERMISSION_DENIED"

    uvloop.run(main())


def test_the_identity_of_a_certificate_names_the_caller(planes, files, made):
    async def main():
        async with serving(planes, files, "inference") as server:
            call = partial(rest_status, made, server.rest, "/predictions/echo", "app", method="POST")
            assert await asyncio.to_thread(call) == 200

    uvloop.run(main())
    assert planes.data.callers == ["mesh"]


def test_a_token_counts_beside_certificates_and_only_if_tokens_are_on(planes, files, made):
    async def statuses(**how):
        async with serving(planes, files, "management", **how) as server:
            call = partial(rest_status, made, server.rest, "/models", "unknown", key="management-key")
            return await asyncio.to_thread(call)

    assert uvloop.run(statuses()) == 200
    assert uvloop.run(statuses(takes_tokens=False)) == 400


def test_a_subject_that_leaves_the_file_is_refused_on_its_open_connection(planes, files, made):
    async def main():
        async with serving(planes, files, "management") as server:
            with requests.Session() as session:
                certificate, key = map(str, made.ci)
                session.cert = (certificate, key)

                def status():
                    url = f"https://localhost:{server.rest.port}/models"
                    return session.get(url, timeout=20, verify=str(made.ca)).status_code

                before = await asyncio.to_thread(status)
                files.clients.write_text(json.dumps({"management": "management-key"}))
                server.keys.refresh()
                assert (before, await asyncio.to_thread(status)) == (200, 400)

    uvloop.run(main())


def test_new_cas_count_for_new_connections(planes, files, made):
    ca = files.tls.client_ca.with_name("copy.pem")
    ca.write_bytes(made.ca.read_bytes())
    certificates = Certificates(dataclasses.replace(files.tls, client_ca=ca))
    ca.write_bytes(made.ca.with_name("other-ca.pem").read_bytes())
    before = certificates.value
    certificates.refresh()
    (issuer,) = certificates.value.context.get_ca_certs()
    assert certificates.value is not before
    assert issuer["subject"] == ((("commonName", "other-ca"),),)


@pytest.mark.parametrize("content", [b"", b"no certificate"])
def test_a_file_without_certificates_is_refused(files, tmp_path, content):
    (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(CertificateUnusable, match="client_ca_file") as caught:
        Certificates(dataclasses.replace(files.tls, client_ca=tmp_path / "ca.pem"))
    assert f"{tmp_path / 'ca.pem'}: " in caught.value.detail


def test_a_foreign_page_in_a_browser_with_a_certificate_changes_nothing(planes, files, made):
    async def main():
        async with serving(planes, files, "management") as server:
            own = f"https://localhost:{server.rest.port}"
            options: dict[str, Any] = {"cert": tuple(map(str, made.ci)), "verify": str(made.ca)}

            async def status(**headers):
                url = f"{own}/models?url=echo.mar"
                call = partial(requests.post, url, headers=headers, timeout=20, **options)
                return (await asyncio.to_thread(call)).status_code

            assert await status(Origin="http://evil.example") == 403
            assert await status(Origin="", Authorization="Basic eDp5") == 403
            assert planes.control.calls == []
            assert await status() == 200
            assert await status(Origin=own) == 200
            assert await status(Origin="http://evil.example", Authorization="Bearer management-key") == 200

    uvloop.run(main())
