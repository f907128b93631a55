"""What names a client that has no identity."""

import pytest

from torchere.serving.access.identity import (
    ANONYMOUS,
    ROLES,
    address_of,
    is_from_this_machine,
    subjects_of,
)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.7", 4321), "10.0.0.7"),
        (("fe80::1", 4321, 0, 2), "fe80::1"),
        (("::ffff:10.0.0.7", 4321, 0, 0), "10.0.0.7"),
        ("", "unix"),
        ("/run/client.sock", "unix"),
        (b"", "unix"),
        (None, "unix"),
    ],
)
def test_an_address_has_no_port_and_clients_of_unix_sockets_share_one(peer, address):
    assert address_of(peer) == address


@pytest.mark.parametrize(
    ("address", "header", "is_near"),
    [
        ("unix", "host", True),
        ("127.0.0.1", "x-forwarded-proto", True),
        ("::1", "Via", False),
        ("127.0.0.1", "X-Forwarded-For", False),
        ("unix", "forwarded", False),
        ("127.0.0.6", "host", False),
        ("10.0.0.7", "host", False),
    ],
)
def test_a_call_is_from_this_machine_unless_its_address_or_a_proxy_says_otherwise(address, header, is_near):
    assert is_from_this_machine(address, ["accept", header]) is is_near


def test_an_anonymous_client_has_its_one_role_and_no_name():
    assert {role: ANONYMOUS[role].roles for role in ROLES} == {role: {role} for role in ROLES}
    assert {identity.name for identity in ANONYMOUS.values()} == {""}


VALID = {"notAfter": "Jan  1 00:00:00 2100 GMT"}
NOW_S = 1_900_000_000.0


def subject(*attributes):
    return tuple((attribute,) for attribute in attributes)


@pytest.mark.parametrize(
    ("certificate", "names"),
    [
        (None, ()),
        ({}, ()),
        (
            {"subject": subject(("countryName", "DE"), ("organizationName", "A & B"), ("commonName", "ci"))},
            ("CN=ci,O=A & B,C=DE",),
        ),
        ({"subject": ((("commonName", "ci"), ("userId", "7")),)}, ("CN=ci+UID=7",)),
        ({"subject": subject(("emailAddress", "a@b.example"))}, ("emailAddress=a@b.example",)),
        (
            {
                "subject": (),
                "subjectAltName": (
                    ("DNS", "ci.example"),
                    ("IP Address", "10.0.0.7"),
                    ("URI", "spiffe://example/ci"),
                ),
            },
            ("DNS:ci.example", "URI:spiffe://example/ci"),
        ),
    ],
)
def test_a_certificate_names_its_client_by_subject_and_alternative_names(certificate, names):
    assert subjects_of(certificate and VALID | certificate, NOW_S) == names


@pytest.mark.parametrize(("passed_s", "names"), [(-1, ("CN=ci",)), (0, ("CN=ci",)), (1, ())])
def test_a_certificate_that_has_expired_names_no_client(passed_s, names):
    expires_at_s = 4_102_444_800.0  # 2100
    certificate = VALID | {"subject": subject(("commonName", "ci"))}
    assert subjects_of(certificate, expires_at_s + passed_s) == names


@pytest.mark.parametrize(
    ("attribute", "names"),
    [
        (("commonName", "J\u00fcrgen"), ("CN=J\u00fcrgen", r"CN=J\C3\BCrgen")),
        (("commonName", "a\nb"), ("CN=a\nb", r"CN=a\0Ab")),
        (("commonName", r"J\C3\BCrgen"), (r"CN=J\\C3\\BCrgen",)),
        (("surname", "Ada"), ("surname=Ada", "SN=Ada")),
        (("serialNumber", "7"), ("serialNumber=7",)),
    ],
)
def test_a_subject_is_known_as_openssl_prints_it_too(attribute, names):
    assert subjects_of(VALID | {"subject": subject(attribute)}, NOW_S) == names


@pytest.mark.parametrize(
    ("value", "written"),
    [("ci,O=Admins", r"ci\,O=Admins"), ("#ci", r"\#ci"), (" ci ", r"\ ci\ "), ("a+b\\", r"a\+b" + 2 * "\\")],
)
def test_a_name_can_not_pretend_to_be_two(value, written):
    assert subjects_of(VALID | {"subject": subject(("commonName", value))}, NOW_S) == (f"CN={written}",)
