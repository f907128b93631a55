from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import stat
import threading
from pathlib import Path

import pytest

from torchere.serving.access.keys import KeyFileUnwritable, KeyRing, TokenKind
from torchere.serving.errors import Unauthorized

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class FakeClock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self, now_s: float = 1_735_689_600.123456) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ring(tmp_path: Path, clock: FakeClock) -> KeyRing:
    return KeyRing(tmp_path / "key_file.json", 60.0, clock)


def bearer(ring: KeyRing, name: str) -> str:
    """The header a client makes from the key file."""
    return f"Bearer {json.loads(ring.path.read_text())[name]['key']}"


def refused(ring: KeyRing, kind: TokenKind, authorization: str | None) -> bool:
    """Whether a header is refused where a key of this kind is needed: the API key, by a renewal."""
    try:
        if kind == "api":
            ring.renew("inference", authorization)
        else:
            ring.authorize(kind, authorization)
    except Unauthorized as err:
        return str(err) == (NOT_RENEWED if kind == "api" else REFUSED)
    return False


def test_no_key_looks_like_an_option_of_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = itertools.chain(["-dash", "--both"], (f"k{number}-" for number in range(9)))
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: next(drawn))
    document = json.loads(KeyRing(tmp_path / "key_file.json", 60.0, FakeClock()).path.read_text())
    assert {entry["key"] for entry in document.values()} == {"k0-", "k1-", "k2-"}


def test_the_key_file_is_torchserves_and_private(ring: KeyRing) -> None:
    document = json.loads(ring.path.read_text())
    assert list(document) == ["management", "inference", "API"]
    assert all(re.fullmatch(r"[\w-]{8}", entry["key"]) for entry in document.values())
    assert document["management"]["expiration time"] == "2025-01-01T01:00:00.123456Z"
    assert document["inference"]["expiration time"] == "2025-01-01T01:00:00.123456Z"
    assert list(document["API"]) == ["key"]
    assert stat.S_IMODE(ring.path.stat().st_mode) == 0o600


def test_the_file_of_an_earlier_run_is_replaced_and_no_draft_stays(tmp_path: Path) -> None:
    path = tmp_path / "key_file.json"
    old = KeyRing(path)
    known = bearer(old, "API")
    path.chmod(0o644)
    assert refused(KeyRing(path), "api", known)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key_file.json"]


def test_a_link_in_its_place_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "key_file.json").symlink_to(target)
    KeyRing(tmp_path / "key_file.json")
    assert target.read_text() == "mine"


def test_each_key_opens_its_own_door_and_no_other(ring: KeyRing) -> None:
    doors: dict[TokenKind, str] = {"inference": "inference", "management": "management", "api": "API"}
    opened = {
        (kind, name)
        for kind in doors
        for name in doors.values()
        if not refused(ring, kind, bearer(ring, name))
    }
    assert opened == set(doors.items())
    with pytest.raises(Unauthorized):
        ring.authorize("metrics", bearer(ring, "management"))


def test_a_client_with_a_key_of_the_file_is_anonymous(ring: KeyRing) -> None:
    identity = ring.authorize("management", bearer(ring, "management"))
    assert (identity.name, identity.roles) == ("", {"management"})


@pytest.mark.parametrize(
    "form", ["{key}", "Basic {key}", "Bearer{key}", "Bearer {key} x", " Bearer {key}", "Bearer "]
)
def test_a_header_of_another_form_is_refused(ring: KeyRing, form: str) -> None:
    key = bearer(ring, "inference").removeprefix("Bearer ")
    assert refused(ring, "inference", form.format(key=key))


@pytest.mark.parametrize("header", [None, "", "Bearer wrong", "Bearer \xfc\udcff", "Bearer ключ"])
def test_a_missing_or_wrong_key_is_refused(ring: KeyRing, header: str | None) -> None:
    assert refused(ring, "inference", header)


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_may_have_any_case_and_the_key_its_own(ring: KeyRing, scheme: str) -> None:
    key = bearer(ring, "inference").removeprefix("Bearer ")
    assert not refused(ring, "inference", f"{scheme} {key}")
    assert refused(ring, "inference", f"{scheme} {key.swapcase()}")


def test_several_blanks_after_the_scheme_are_fine(ring: KeyRing) -> None:
    key = bearer(ring, "inference").removeprefix("Bearer ")
    assert not refused(ring, "inference", f"Bearer \t {key}")


def test_keys_expire_except_the_api_key(ring: KeyRing, clock: FakeClock) -> None:
    clock.now_s += 3599
    assert not refused(ring, "inference", bearer(ring, "inference"))
    clock.now_s += 1
    assert refused(ring, "inference", bearer(ring, "inference"))
    assert refused(ring, "management", bearer(ring, "management"))
    assert not refused(ring, "api", bearer(ring, "API"))


def test_renewing_voids_the_old_key_and_leaves_the_others(ring: KeyRing, clock: FakeClock) -> None:
    old, management = bearer(ring, "inference"), bearer(ring, "management")
    clock.now_s += 7200
    ring.renew("inference", bearer(ring, "API"))
    assert refused(ring, "inference", old)
    assert not refused(ring, "inference", bearer(ring, "inference"))
    assert bearer(ring, "management") == management
    assert json.loads(ring.path.read_text())["inference"]["expiration time"].startswith("2025-01-01T03:00:00")


@pytest.mark.parametrize("wanted", ["", "api", "API", "Inference", "other"])
def test_only_the_two_expiring_keys_can_be_renewed(ring: KeyRing, wanted: str) -> None:
    before = ring.path.read_text()
    with pytest.raises(Unauthorized, match=re.escape(NOT_RENEWED)):
        ring.renew(wanted, bearer(ring, "API"))
    assert ring.path.read_text() == before


def test_renewing_needs_the_api_key(ring: KeyRing) -> None:
    with pytest.raises(Unauthorized, match=re.escape(NOT_RENEWED)):
        ring.renew("management", bearer(ring, "management"))


def test_a_directory_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KeyFileUnwritable) as caught:
        KeyRing(tmp_path / "none" / "key_file.json")
    assert "No such file or directory; expected a writable directory" in caught.value.detail
    assert "--disable-token-auth" in caught.value.detail


def test_when_the_file_can_not_be_written_the_old_key_stays_in_force(ring: KeyRing) -> None:
    api, inference = bearer(ring, "API"), bearer(ring, "inference")
    ring.path.unlink()
    ring.path.mkdir()  # nothing can be moved onto a directory
    with pytest.raises(KeyFileUnwritable):
        ring.renew("inference", api)
    assert not refused(ring, "inference", inference)
    assert os.listdir(ring.path.parent) == ["key_file.json"]


def test_keys_renewed_at_once_leave_file_and_memory_agreeing(ring: KeyRing) -> None:
    api = bearer(ring, "API")
    threads = [
        threading.Thread(target=ring.renew, args=(kind, api)) for kind in ("inference", "management") * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not refused(ring, "inference", bearer(ring, "inference"))
    assert not refused(ring, "management", bearer(ring, "management"))


def test_no_key_is_shown_with_what_holds_it(ring: KeyRing) -> None:
    secret = bearer(ring, "API").removeprefix("Bearer ")
    assert secret not in repr(ring._keys)


def test_a_closed_ring_deletes_its_file_and_leaves_that_of_a_later_server(tmp_path: Path) -> None:
    path = tmp_path / "key_file.json"
    earlier, later = KeyRing(path), KeyRing(path)
    earlier.close()
    assert path.exists()
    later.renew("inference", bearer(later, "API"))
    later.close()
    assert not path.exists()
    later.close()  # there is nothing to delete any more


def test_a_key_made_while_the_clock_was_ahead_lives_no_longer_than_others(tmp_path: Path) -> None:
    wall, monotonic = FakeClock(1_735_689_600.0 + 86_400), FakeClock(5.0)
    ring = KeyRing(tmp_path / "key_file.json", 60.0, wall, monotonic)
    header = bearer(ring, "inference")
    wall.now_s -= 86_400  # the clock is set right
    assert not refused(ring, "inference", header)
    monotonic.now_s += 3600
    assert refused(ring, "inference", header)
    assert not refused(ring, "api", bearer(ring, "API"))
