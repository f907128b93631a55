"""Register, scale, move the default and unregister while clients predict: nobody gets a wrong answer.

`TORCHERE_CHURN_OPERATIONS=2000 pytest tests/chaos` runs the long version.
"""

import os
import random
import threading
from pathlib import Path
from typing import Any

import psutil

OPERATIONS = int(os.environ.get("TORCHERE_CHURN_OPERATIONS", "60"))
VERSIONS = ("1.0", "2.0", "3.0")
HANDLER = """
def handle(data, context):
    return None if data is None else [context.manifest["model"]["modelVersion"]] * len(data)
"""
# What the contract names for a version that is not there, or has no executor, at that moment.
NAMED = {404: "ModelVersionNotFoundException ModelNotFoundException", 503: "ServiceUnavailableException"}


class Client(threading.Thread):
    """Predicts with versions at random until told to stop; keeps every answer that is wrong."""

    def __init__(self, server: Any, seed: int) -> None:
        super().__init__()
        self.server = server
        self.random = random.Random(seed)
        self.stopping = threading.Event()
        self.wrong: list[str] = []
        self.right = 0

    def run(self) -> None:
        while not self.stopping.is_set():
            version = self.random.choice((*VERSIONS, ""))
            reply = self.server.call("POST", f"/predictions/churn/{version}".rstrip("/"), b"x")
            if reply.status == 200 and reply.body.decode() in ((version,) if version else VERSIONS):
                self.right += 1
            elif reply.status not in NAMED or reply.json()["type"] not in NAMED[reply.status]:
                self.wrong.append(f"{version or 'default'}: {reply.status} {reply.body!r}")


def resources(pid: int, temp: Path) -> dict[str, int]:
    server = psutil.Process(pid)
    return {
        "processes": len(server.children(recursive=True)),
        "threads": server.num_threads(),
        "files": server.num_fds(),
        "unpacked": len(list(temp.rglob("h.py"))),
    }


def change(server: Any, chance: random.Random) -> None:
    """One operation of an operator, whatever comes of it; a 5xx must be one the contract names."""
    version = chance.choice(VERSIONS)
    operation = chance.choice(("register", "register", "unregister", "scale", "default"))
    if operation == "register":
        reply = server.register(f"churn-{version}.mar", initial_workers=1)
    elif operation == "unregister":
        reply = server.call("DELETE", f"/models/churn/{version}", api="management")
    elif operation == "scale":
        path = f"/models/churn/{version}?min_worker={chance.randrange(3)}&synchronous=true"
        reply = server.call("PUT", path, api="management")
    else:
        reply = server.call("PUT", f"/models/churn/{version}/set-default", api="management")
    assert reply.status in (200, 403, 404, 409), f"{operation} {version}: {reply.status} {reply.body!r}"


def test_operators_and_clients_do_not_get_in_each_others_way(
    pack: Any, start_server: Any, store: Path, monkeypatch: Any
) -> None:
    for version in VERSIONS:
        pack(f"churn-{version}", {"h.py": HANDLER}, handler="h.py", modelName="churn", modelVersion=version)
    temp = store.parent / "temp"
    temp.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp))
    server = start_server("--disable-token-auth", "--enable-model-api")
    server.register("churn-1.0.mar", initial_workers=1)  # starts the fork server, which stays
    server.call("DELETE", "/models/churn/1.0", api="management")
    before = resources(server.process.pid, temp)

    chance = random.Random(7)
    clients = [Client(server, seed) for seed in range(4)]
    for client in clients:
        client.start()
    try:
        for _ in range(OPERATIONS):
            change(server, chance)
    finally:
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join(60)
    assert [client.wrong for client in clients] == [[]] * 4
    assert sum(client.right for client in clients) > 0

    for _ in VERSIONS:  # the default can go last only
        for version in VERSIONS:
            server.call("DELETE", f"/models/churn/{version}", api="management")
    after = resources(server.process.pid, temp)
    assert after["processes"] == before["processes"]
    assert after["unpacked"] == before["unpacked"]
    assert (
        after["files"] <= before["files"] + 4
    )  # the keep-alive connections of the clients close by themselves
    assert after["threads"] <= before["threads"] + 8  # the pool for disk work grows to its bound, and stays
