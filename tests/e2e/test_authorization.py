"""Identities, the audit log, and management that no client may call, on a running server."""

import json
import time

import pytest

HANDLER = "def handle(data, context):\n    return None if data is None else ['ok'] * len(data)\n"
KEYS = {
    "inference": {"key": "key-of-team-a", "identity": "team-a"},
    "metrics": "key-of-prometheus",
    "identities": [{"identity": "ci", "roles": ["management"], "key": "key-of-ci"}],
}


@pytest.fixture(scope="module")
def server(start_server, pack, store):
    """A server with identities, an audit log and a role for its metrics."""
    pack("net", {"h.py": HANDLER}, handler="h.py:handle")
    keys = store.parent / "identities.json"
    keys.write_text(json.dumps(KEYS))
    keys.chmod(0o600)
    properties = f"token_keys_file={keys}\nmetrics_authorization=true\naudit_log=audit/audit.json\n"
    return start_server("--enable-model-api", properties=properties)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_changes_are_audited_with_identity_and_the_name_that_an_archive_gets(server):
    target = "/models?url=net.mar&initial_workers=1"
    assert server.call("POST", target, api="management", **bearer("key-of-team-a")).status == 400
    assert server.call("POST", target, api="management", **bearer("key-of-ci")).status == 200
    assert server.call("POST", "/predictions/net", b"x", **bearer("key-of-team-a")).status == 200
    assert server.call("GET", "/models", api="management", **bearer("key-of-ci")).status == 200
    assert server.call("POST", "/models?url=none.mar", api="management", **bearer("key-of-ci")).status == 404
    assert server.call("DELETE", "/models/net", api="management", **bearer("key-of-ci")).status == 200
    log = server.folder / "audit/audit.json"
    until_s = time.monotonic() + 30
    while log.read_text().count("\n") < 4 and time.monotonic() < until_s:
        time.sleep(0.01)  # a line is written once its response is sent
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    names = ("identity", "address", "transport", "action", "model", "version", "outcome", "status")
    assert [tuple(line[name] for name in names) for line in lines] == [
        ("", "127.0.0.1", "rest", "register", "", "", "refused", 400),
        ("ci", "127.0.0.1", "rest", "register", "net", "1.0", "done", 200),
        ("ci", "127.0.0.1", "rest", "register", "none.mar", "", "failed", 404),
        ("ci", "127.0.0.1", "rest", "unregister", "net", "", "done", 200),
    ]
    assert server.log().count('"logger": "AUDIT_LOG"') == 4


def test_the_metrics_need_their_role(server):
    statuses = [
        server.call("GET", "/metrics", api="metrics", **headers).status
        for headers in ({}, bearer("key-of-ci"), bearer("key-of-team-a"), bearer("key-of-prometheus"))
    ]
    assert statuses == [400, 400, 400, 200]


@pytest.mark.parametrize(
    ("line", "address"),
    [("management_address=http://0.0.0.0:0", "0.0.0.0:0"), ("grpc_management_address=0.0.0.0", "0.0.0.0:0")],
)
def test_without_authorization_management_beyond_loopback_stops_the_start(start_server, line, address):
    with pytest.raises(AssertionError, match="ended with 1") as caught:
        start_server("--disable-token-auth", properties=f"{line}\n")
    assert f"every client that reaches {address} may change models" in str(caught.value)
    assert "insecure_management=true" in str(caught.value)


def test_an_operator_may_open_management_to_every_client(start_server):
    properties = "management_address=http://0.0.0.0:0\ninsecure_management=true\n"
    server = start_server("--disable-token-auth", properties=properties)
    port = server.rest["management"].rpartition(":")[2]
    server.rest["management"] = f"127.0.0.1:{port}"
    assert server.call("GET", "/models", api="management").status == 200
    assert "insecure_management: every client that reaches" in server.log()


def test_an_audit_log_that_can_not_be_written_stops_the_start(start_server):
    with pytest.raises(AssertionError, match="ended with 1") as caught:
        start_server(properties="audit_log=/proc/none/audit.json\n")
    assert "The audit log can't be written" in str(caught.value)
