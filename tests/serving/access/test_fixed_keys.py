"""Keys that somebody else made, in a file that every replica reads."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from torchere.serving.access.fixed_keys import MAX_FILE_BYTES, FixedKeys, KeyFileUnusable, read_clients
from torchere.serving.access.identity import Identity, Role
from torchere.serving.access.keys import KeyRing
from torchere.serving.errors import NotAllowed, Unauthorized

PLAIN = {"inference": "inference-key", "management": "management-key"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def write(path: Path, content: object, mode: int = 0o600) -> None:
    draft = path.with_name("draft")
    draft.write_text(content if isinstance(content, str) else json.dumps(content))
    draft.chmod(mode)
    os.replace(draft, path)


def passes(keys: FixedKeys, kind: Role, key: str) -> bool:
    try:
        keys.authorize(kind, f"Bearer {key}")
    except Unauthorized:
        return False
    return True


def refusal(path: Path) -> str:
    with pytest.raises(KeyFileUnusable) as caught:
        FixedKeys(path)
    return caught.value.detail


def test_each_key_opens_its_own_door_and_no_other(path: Path) -> None:
    write(path, PLAIN)
    keys = FixedKeys(path)
    assert passes(keys, "inference", "inference-key")
    assert passes(keys, "management", "management-key")
    assert not passes(keys, "management", "inference-key")
    assert not passes(keys, "inference", "management-key")


@pytest.mark.parametrize("header", [None, "", "inference-key", "Bearer ", "Basic inference-key", "Bearer é"])
def test_a_header_of_another_form_is_refused(path: Path, header: str | None) -> None:
    write(path, PLAIN)
    with pytest.raises(Unauthorized):
        FixedKeys(path).authorize("inference", header)


def test_a_file_that_a_server_wrote_can_be_used(path: Path, tmp_path: Path) -> None:
    KeyRing(tmp_path / "key_file.json")
    made = json.loads((tmp_path / "key_file.json").read_text())
    (tmp_path / "key_file.json").rename(path)
    keys = FixedKeys(path)
    assert passes(keys, "inference", made["inference"]["key"])
    assert not passes(keys, "inference", made["API"]["key"])


@pytest.mark.parametrize(
    ("expires", "expected_s"),
    [
        ("2025-01-01T00:00:00Z", 1_735_689_600.0),
        ("2025-01-01T02:00:00.5+02:00", 1_735_689_600.5),
        ("2025-01-01T00:00:00.250Z", 1_735_689_600.25),
        ("2025-01-01T00:00:00.750000999Z", 1_735_689_600.75),  # nanoseconds, as Java has them
    ],
)
def test_keys_expire_when_the_file_says_so(path: Path, expires: str, expected_s: float) -> None:
    write(path, {"inference": {"key": "inference-key", "expiration time": expires}})
    now_s = [expected_s - 0.125]
    keys = FixedKeys(path, lambda: now_s[0])
    assert passes(keys, "inference", "inference-key")
    now_s[0] = expected_s
    assert not passes(keys, "inference", "inference-key")


def test_a_time_without_a_zone_is_utc_wherever_the_server_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, {"inference": {"key": "inference-key", "expiration time": "2025-01-01T00:00:00"}})
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "America/New_York")
        time.tzset()
        clients = read_clients(path)
    time.tzset()
    assert [key.expires_at_s for key in clients.keys["inference"].values()] == [1_735_689_600.0]


def test_of_several_keys_each_one_passes_so_that_they_can_be_rotated(path: Path) -> None:
    write(path, {"inference": ["old-key-1", {"key": "new-key-2"}]})
    keys = FixedKeys(path)
    assert passes(keys, "inference", "old-key-1")
    assert passes(keys, "inference", "new-key-2")
    write(path, {"inference": ["new-key-2"]})
    keys.refresh()
    assert not passes(keys, "inference", "old-key-1")
    assert passes(keys, "inference", "new-key-2")


def test_a_kind_that_is_left_out_lets_nobody_pass(path: Path) -> None:
    write(path, {"inference": "inference-key"})
    keys = FixedKeys(path)
    assert not passes(keys, "management", "inference-key")
    assert not passes(keys, "management", "")


def test_a_broken_new_file_leaves_the_keys_in_force(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, PLAIN)
    keys = FixedKeys(path)
    write(path, '{"inference": "secret-part')
    with caplog.at_level(logging.INFO):
        keys.refresh()
    assert passes(keys, "inference", "inference-key")
    assert "no JSON" in caplog.text
    assert "secret-part" not in caplog.text


def test_a_new_file_is_said_and_no_key_is_ever_shown(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, PLAIN)
    keys = FixedKeys(path)
    write(path, {"inference": "another-key"})
    with caplog.at_level(logging.INFO):
        keys.refresh()
    assert passes(keys, "inference", "another-key")
    assert f"The token keys: read again from {path}" in caplog.text
    assert "another-key" not in caplog.text + repr(keys.value)


def test_nobody_renews_the_keys_over_the_network(path: Path) -> None:
    write(path, PLAIN)
    with pytest.raises(NotAllowed, match="come from a file"):
        FixedKeys(path).renew("inference", "Bearer inference-key")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o777])
def test_a_file_that_is_open_to_others_is_refused(path: Path, mode: int) -> None:
    write(path, PLAIN, mode)
    assert f"mode {mode:04o}, open to others; expected 0600, or 0440 with a group" in refusal(path)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_owner_and_group_may_read_it(path: Path, mode: int) -> None:
    write(path, PLAIN, mode)
    assert passes(FixedKeys(path), "inference", "inference-key")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "no JSON"),
        ("[" * MAX_FILE_BYTES, "while decoding a JSON array"),  # its depth; Python 3.14 words it differently
        ("[]", "no JSON object"),
        ({}, "neither inference nor management"),
        ({"API": "inference-key"}, "neither inference nor management"),
        ({"inferense": "inference-key"}, "unknown member 'inferense'"),
        ({"inference": 12345678}, "no key in 'inference'"),
        ({"inference": {"expiration time": "2030-01-01T00:00:00Z"}}, "no key in 'inference'"),
        ({"inference": [["inference-key"]]}, "no key in 'inference'"),
        ({"inference": "short"}, "shorter than 8 characters"),
        ({"inference": "with a blank"}, "or is not printable ASCII"),
        ({"inference": "inference-key\n"}, "or is not printable ASCII"),
        ({"inference": {"key": "inference-key", "expiration time": "soon"}}, "no ISO 8601 time"),
        ({"inference": {"key": "inference-key", "expires": "2030"}}, "'expires' of a key in 'inference'"),
        ({"inference": {"key": "inference-key", "subject": "CN=ci"}}, "'subject' of a key in 'inference'"),
        (" " * (MAX_FILE_BYTES + 1), "more than 1048576 bytes"),
    ],
)
def test_what_is_no_key_file_is_refused_with_what_was_found(path: Path, content: Any, found: str) -> None:
    write(path, content)
    detail = refusal(path)
    assert found in detail
    assert '{"inference": "KEY", "management": "KEY"}' in detail
    assert "inference-key" not in detail


def test_bytes_that_are_no_text_are_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe{}")
    path.chmod(0o600)
    assert "no UTF-8" in refusal(path)


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    assert f"{path}: No such file or directory" in refusal(path)


IDENTITIES = {
    "inference": [{"key": "key-of-team-a", "identity": "team-a"}, "nameless-key"],
    "metrics": "prometheus-key",
    "identities": [
        {"identity": "ci", "roles": ["management", "inference"], "key": ["ci-key-1", "ci-key-2"]},
        {"identity": "mesh", "roles": "inference", "subject": ["CN=mesh,O=Example", "URI:spiffe://a/mesh"]},
        {"identity": "both", "roles": "metrics", "key": "key-of-both", "subject": "CN=both"},
    ],
}
CI = Identity("ci", frozenset({"management", "inference"}))


@pytest.mark.parametrize(
    ("role", "key", "identity"),
    [
        ("inference", "key-of-team-a", Identity("team-a", frozenset({"inference"}))),
        ("inference", "nameless-key", Identity("", frozenset({"inference"}))),
        ("metrics", "prometheus-key", Identity("", frozenset({"metrics"}))),
        ("management", "ci-key-1", CI),
        ("inference", "ci-key-2", CI),
        ("metrics", "key-of-both", Identity("both", frozenset({"metrics"}))),
    ],
)
def test_a_key_belongs_to_an_identity_with_roles(
    path: Path, role: Role, key: str, identity: Identity
) -> None:
    write(path, IDENTITIES)
    assert FixedKeys(path).authorize(role, f"Bearer {key}") == identity


@pytest.mark.parametrize(
    ("role", "key"),
    [("management", "key-of-team-a"), ("inference", "prometheus-key"), ("metrics", "ci-key-1")],
)
def test_an_identity_has_no_role_but_its_own(path: Path, role: Role, key: str) -> None:
    write(path, IDENTITIES)
    assert not passes(FixedKeys(path), role, key)


@pytest.mark.parametrize("takes_tokens", [True, False])
@pytest.mark.parametrize("subjects", [("CN=mesh,O=Example",), ("CN=x", "URI:spiffe://a/mesh")])
def test_a_name_of_a_certificate_is_enough(path: Path, subjects: list[str], takes_tokens: bool) -> None:
    write(path, IDENTITIES)
    keys = FixedKeys(path, takes_tokens=takes_tokens)
    assert keys.authorize("inference", None, subjects).name == "mesh"
    with pytest.raises(Unauthorized):
        keys.authorize("management", None, subjects)
    with pytest.raises(Unauthorized):
        keys.authorize("inference", None, ["CN=mesh"])


@pytest.mark.parametrize(("now_s", "is_known"), [(1_893_455_999.0, True), (1_893_456_000.0, False)])
def test_a_name_of_a_certificate_expires_when_the_file_says_so(
    path: Path, now_s: float, is_known: bool
) -> None:
    entry = {"identity": "ci", "roles": ["management"], "subject": "CN=ci"}
    write(path, {"identities": [entry | {"expiration time": "2030-01-01T00:00:00Z"}]})
    keys = FixedKeys(path, lambda: now_s)
    if is_known:
        assert keys.authorize("management", None, ["CN=ci"]).name == "ci"
    else:
        with pytest.raises(Unauthorized):
            keys.authorize("management", None, ["CN=ci"])


def test_a_certificate_without_the_role_leaves_the_key_to_count(path: Path) -> None:
    write(path, IDENTITIES)
    assert FixedKeys(path).authorize("management", "Bearer ci-key-1", ["CN=mesh,O=Example"]) == CI


def test_without_tokens_no_key_passes(path: Path) -> None:
    write(path, IDENTITIES)
    assert not passes(FixedKeys(path, takes_tokens=False), "management", "ci-key-1")


def test_of_two_entries_of_one_key_the_longer_one_counts(path: Path) -> None:
    soon = {"key": "inference-key", "expiration time": "2025-01-01T00:00:00Z"}
    for entries in (["inference-key", soon], [soon, "inference-key"]):
        write(path, {"inference": entries})
        assert passes(FixedKeys(path), "inference", "inference-key")


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("ci", "no object in 'identities'"),
        ({"roles": ["inference"], "key": "inference-key"}, "the name of an identity is missing"),
        ({"identity": "a b", "roles": ["inference"], "key": "inference-key"}, "is not 1 to 100 letters"),
        ({"identity": "ci", "key": "inference-key"}, "no roles of identity 'ci'"),
        ({"identity": "ci", "roles": ["api"], "key": "inference-key"}, "an unknown role of identity 'ci'"),
        ({"identity": "ci", "roles": [["x"]], "key": "inference-key"}, "an unknown role of identity 'ci'"),
        ({"identity": "ci", "roles": ["inference"]}, "neither key nor subject of identity 'ci'"),
        ({"identity": "ci", "roles": ["inference"], "subject": 7}, "a subject of identity 'ci' is no text"),
        (
            {"identity": "ci", "roles": ["inference"], "subject": "CN=ci", "expiration time": "soon"},
            "the expiration time of 'ci' is no ISO 8601 time",
        ),
        ({"identity": "ci", "roles": ["inference"], "keys": "x"}, "unknown member 'keys' of identity 'ci'"),
        ({"identity": "ci", "roles": ["metrics"], "key": "short"}, "a key in 'ci' is shorter"),
        ({"identity": "ci", "roles": ["inference"], "key": "key-of-team-a"}, "that of another identity"),
        ({"identity": "ci", "roles": ["inference"], "subject": "CN=both"}, "the subject of another one"),
    ],
)
def test_an_identity_that_can_not_be_read_is_refused(path: Path, entry: Any, found: str) -> None:
    write(path, {**IDENTITIES, "identities": [*IDENTITIES["identities"], entry]})
    detail = refusal(path)
    assert found in detail
    assert "inference-key" not in detail


def test_a_file_of_subjects_alone_is_enough(path: Path) -> None:
    write(path, {"identities": [{"identity": "ci", "roles": ["management"], "subject": "CN=ci"}]})
    assert FixedKeys(path).authorize("management", None, ["CN=ci"]).name == "ci"


def test_an_identity_has_the_limits_of_its_entries(path: Path) -> None:
    team = {"identity": "team", "roles": ["inference"], "rate": 2.5, "concurrency": 3, "weight": 2}
    other = {"identity": "other", "roles": ["inference"], "key": "other-key-1"}
    admin = {"identity": "admin", "roles": ["management"], "key": "admin-key-1"}
    old = {"identity": "team", "key": "team-key-0", "burst": 4}
    write(path, {"inference": old, "identities": [team | {"key": "team-key-1"}, other, admin]})
    keys = FixedKeys(path)
    assert keys.client_limits() == {
        "team": {"rate": 2.5, "burst": 4, "concurrency": 3, "weight": 2},
        "other": {},
    }
    assert keys.client_limits() is keys.client_limits()
    write(path, {"identities": [other]})
    keys.refresh()
    assert keys.client_limits() == {"other": {}}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            {"inference": {"identity": "team", "key": "team-key-1", "rate": "5"}},
            "a limit of 'team' is unusable: its rate is '5'",
        ),
        ({"inference": {"key": "team-key-1", "rate": 5}}, "an entry has limits and no identity"),
        (
            {
                "inference": [
                    {"identity": "team", "key": "team-key-1", "rate": 5},
                    {"identity": "team", "key": "team-key-2", "rate": 6},
                ]
            },
            "two entries of identity 'team' have different limits",
        ),
    ],
)
def test_unusable_limits_are_named(path: Path, document: dict[str, Any], text: str) -> None:
    write(path, document)
    with pytest.raises(KeyFileUnusable) as error:
        FixedKeys(path)
    assert text in error.value.detail
    assert "team-key" not in error.value.detail
