"""Where the machines of a model meet, and which secret they need for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from torchere.serving.config.server_settings import ModelSettings, ParallelSettings, RendezvousSettings
from torchere.serving.errors import ServingError
from torchere.serving.store.environment import Environment
from torchere.serving.store.package import StoredArchive
from torchere.serving.workers.rendezvous import rendezvous_of, secret_of

ARCHIVE = StoredArchive("s3://bucket/net.mar", Path("/nowhere"), file_name="net.mar", fingerprint="ab")
SETTINGS = ModelSettings(
    startup_timeout_s=100.0,
    parallel=ParallelSettings("tp", 2, least_machines=1, most_machines=3, last_call_s=7.0, run_id="job"),
)


def test_a_model_on_one_machine_meets_no_other() -> None:
    one = replace(SETTINGS, parallel=ParallelSettings("tp", 2))
    assert rendezvous_of(ARCHIVE, one, RendezvousSettings()) is None
    assert rendezvous_of(ARCHIVE, ModelSettings(), RendezvousSettings()) is None


def test_the_server_says_where_and_the_model_at_which_port() -> None:
    server = RendezvousSettings("127.0.0.2", 1234)
    found = rendezvous_of(ARCHIVE, SETTINGS, server)
    assert found is not None
    assert (found.host, found.port, found.least, found.most) == ("127.0.0.2", 1234, 1, 3)
    assert not found.is_patient
    at_startup = rendezvous_of(ARCHIVE, SETTINGS, server, at_startup=True)
    assert at_startup is not None
    assert at_startup.is_patient
    assert (found.join_s, found.last_call_s, found.run_id) == (80.0, 7.0, "job")
    assert (found.archive, found.url, found.fingerprint) == ("net.mar", "s3://bucket/net.mar", "ab")
    assert SETTINGS.parallel is not None
    other = rendezvous_of(ARCHIVE, replace(SETTINGS, parallel=replace(SETTINGS.parallel, port=99)), server)
    assert other is not None
    assert other.port == 99


def test_an_archive_with_packages_of_its_own_has_one_machine() -> None:
    archive = replace(ARCHIVE, environment=Environment("python"))
    with pytest.raises(ServingError, match="packages of its own"):
        rendezvous_of(archive, SETTINGS, RendezvousSettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "leader.example"])
def test_an_address_that_others_reach_needs_a_secret(tmp_path: Path, host: str) -> None:
    with pytest.raises(ServingError, match="read its requests") as error:
        rendezvous_of(ARCHIVE, SETTINGS, RendezvousSettings(host))
    assert "rendezvous_secret_file" in error.value.detail
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    found = rendezvous_of(ARCHIVE, SETTINGS, RendezvousSettings(host, secret_file=secret))
    assert found is not None
    assert found.secret == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(found)


def test_a_secret_that_can_not_be_read_or_is_short_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(ServingError, match="No such file"):
        secret_of(RendezvousSettings(secret_file=secret), needed=False)
    secret.write_text("   short   ")
    with pytest.raises(ServingError, match="holds 5 bytes, expected at least 16"):
        secret_of(RendezvousSettings(secret_file=secret), needed=False)
