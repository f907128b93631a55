"""What names a client that has no identity."""

import pytest

from torchere.serving.access.identity import ANONYMOUS, ROLES, address_of


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


def test_an_anonymous_client_has_its_one_role_and_no_name():
    assert {role: ANONYMOUS[role].roles for role in ROLES} == {role: {role} for role in ROLES}
    assert {identity.name for identity in ANONYMOUS.values()} == {""}
