"""Operators who change the same model at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SLOW = """
import os, time
def handle(data, context):
    if data is None:
        while not os.path.exists("never"):
            time.sleep(0.01)
"""
QUICK = "def handle(data, context):\n    return data and ['quick'] * len(data)\n"


def until_known(server: Any, path: str) -> None:
    while server.call("GET", path, api="management").status == 404:
        time.sleep(0.01)


def test_a_model_that_is_unregistered_while_it_loads_is_a_conflict_for_who_registers_it(
    pack: Any, open_server: Any
) -> None:
    slow = pack("slow", {"h.py": SLOW}, handler="h.py")
    quick = pack("quick", {"h.py": QUICK}, handler="h.py", modelName="slow")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(open_server.register, slow, initial_workers=1)
        until_known(open_server, "/models/slow")
        removed = pool.submit(open_server.call, "DELETE", "/models/slow", api="management")
        while (second := open_server.register(quick, initial_workers=1)).status == 409:
            time.sleep(0.001)  # it is in the map still
        assert (removed.result().status, second.status) == (200, 200)
    refused = first.result().json()
    assert (refused["code"], refused["type"]) == (409, "ConflictStatusException")
    assert refused["message"] == "Model version 1.0 of model slow was unregistered while it was loading"
    assert open_server.call("POST", "/predictions/slow", b"x").body == b"quick"
    assert open_server.call("DELETE", "/models/slow", api="management").status == 200


def test_a_default_that_does_not_load_leaves_the_other_versions_reachable(
    pack: Any, open_server: Any
) -> None:
    slow = pack("two-1", {"h.py": SLOW}, handler="h.py", modelName="two")
    quick = pack("two-2", {"h.py": QUICK}, handler="h.py", modelName="two", modelVersion="2.0")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_server.register, slow, initial_workers=1, startup_timeout=2)
        until_known(open_server, "/models/two")
        assert open_server.register(quick, initial_workers=1).status == 200
        assert first.result().status == 500
    assert open_server.call("POST", "/predictions/two", b"x").body == b"quick"
    assert open_server.call("GET", "/models", api="management").status == 200
    assert open_server.call("DELETE", "/models/two", api="management").status == 200


def test_a_model_that_hangs_while_it_loads_can_be_scaled_to_nothing(pack: Any, open_server: Any) -> None:
    hanging = pack("hanging", {"h.py": SLOW}, handler="h.py")
    assert open_server.register(hanging, initial_workers=1, synchronous="false").status == 202
    path = "/models/hanging?min_worker=0&synchronous=true"
    assert open_server.call("PUT", path, api="management").status == 200
    (described,) = open_server.call("GET", "/models/hanging", api="management").json()
    assert (described["workers"], described["torchere"]["state"]) == ([], "new")
    assert open_server.call("DELETE", "/models/hanging", api="management").status == 200
