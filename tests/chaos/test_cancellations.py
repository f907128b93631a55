"""Clients that go away at random moments: nothing restarts, nothing leaks, and the others get their answers.

`TORCHERE_CANCELLATIONS=10000 pytest tests/chaos/test_cancellations.py` runs the long version.
"""

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.server import Endpoints, Server

CANCELLATIONS = int(os.environ.get("TORCHERE_CANCELLATIONS", "1000"))
CLIENTS = 32
EXECUTORS = 2  # of each model
WORK = """
import time
from ts.handler_utils.utils import send_intermediate_predict_response
class Handler:
    def initialize(self, context): pass
    def handle(self, data, context):
        time.sleep(0.001)
        bodies = [bytes(row["body"]) for row in data]
        if bodies[0].startswith(b"stream"):
            for _ in range(3):
                send_intermediate_predict_response(["."] * len(data), context.request_ids, "", 200, context)
                time.sleep(0.001)
        return [body.decode() for body in bodies]
"""
MODELS = ("processes", "threads", "batches")


class Client:
    """Sends a request and goes away at a random moment, or stays and wants its answer."""

    def __init__(self, address: Address, chance: random.Random) -> None:
        self.address = address
        self.chance = chance
        self.gone = 0
        self.right = 0
        self.wrong: list[bytes] = []

    async def call(self, number: int) -> None:
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        try:
            body = b"%s %d" % (self.chance.choice((b"plain", b"stream")), number)
            head = b"POST /predictions/%s HTTP/1.1\r\nhost: x\r\ncontent-type: application/octet-stream\r\n"
            head = head % self.chance.choice(MODELS).encode() + b"content-length: %d\r\n\r\n" % len(body)
            if self.chance.random() < 0.1:  # stays
                writer.write(head.replace(b"host: x", b"host: x\r\nconnection: close") + body)
                self.check(body, await asyncio.wait_for(reader.read(), 60))
                return
            writer.write((head + body)[: self.chance.choice((10, len(head), None, None, None, None))])
            await asyncio.sleep(self.chance.random() * 0.02)
            self.gone += 1
        finally:
            if self.chance.random() < 0.5:
                writer.transport.abort()
            writer.close()

    def check(self, body: bytes, answer: bytes) -> None:
        if answer.startswith(b"HTTP/1.1 200") and body in answer:
            self.right += 1
        else:
            self.wrong.append(answer)


async def settled(server: Server) -> None:
    """Until every prediction that was accepted is answered, and no executor is at one."""
    while len(set(server.ledger())) > 1 or idle_executors(server) < EXECUTORS * len(MODELS):
        await asyncio.sleep(0)


def idle_executors(server: Server) -> int:
    return sum(len(version.pool.idle_ids()) for version in server._registry.versions())


def coroutine_name(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    return str(coroutine.__qualname__)


async def resources(server: Server) -> dict[str, int]:
    """What there is in this process once everything has come to rest."""
    await settled(server)
    for _ in range(1000):  # turns of the loop in which connections close
        await asyncio.sleep(0)
    gc.collect()
    versions = list(server._registry.versions())
    return {
        **Counter(f"task {coroutine_name(task)}" for task in asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": psutil.Process().num_fds(),
        "waiting": sum(version.batcher.queue_length for version in versions),
    }


async def storm(endpoints: Endpoints, count: int, chance: random.Random) -> list[Client]:
    numbers = iter(range(count))

    async def run(client: Client) -> None:
        for number in numbers:
            await client.call(number)

    clients = [Client(endpoints.rest["inference"], chance) for _ in range(CLIENTS)]
    await asyncio.gather(*(run(client) for client in clients))
    return clients


def leaked(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What is more than it was; tasks by what they run, so that one that ended hides none that stays."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def test_clients_that_go_away_leave_nothing_behind(pack: Any, store: Path) -> None:
    configs = {
        "processes": "",
        "threads": "isolation: thread\n",
        "batches": "batchSize: 4\nmaxBatchDelay: 5\n",
    }
    for model in MODELS:
        config = f"{configs[model]}minWorkers: {EXECUTORS}\nmaxWorkers: {EXECUTORS}\njobQueueSize: 1000\n"
        pack(model, {"h.py": WORK, "c.yaml": config}, handler="h.py", configFile="c.yaml")
    local = Address()
    settings = ServerSettings(
        model_store=store,
        load_models=tuple(f"{model}.mar" for model in MODELS),
        inference_address=local,
        management_address=local,
        metrics_address=None,
        grpc_inference_address=None,
        grpc_management_address=None,
        token_auth_enabled=False,
        system_metrics_enabled=False,
        temp_dir=store.parent,
    )

    async def main() -> None:
        server = Server(settings)
        endpoints = await server.start()
        try:
            while not server._dataplane.readiness().ready:
                await asyncio.sleep(0)
            versions = list(server._registry.versions())
            chance = random.Random(11)
            await storm(endpoints, 200, chance)  # pools and caches fill up
            before = await resources(server)
            pids = [status.pid for version in versions for status in version.pool.statuses()]
            clients = await storm(endpoints, CANCELLATIONS, chance)
            after = await resources(server)
            assert [client.wrong for client in clients] == [[]] * CLIENTS
            assert sum(client.right for client in clients) > 0
            assert sum(client.gone for client in clients) > 0.8 * CANCELLATIONS
            assert leaked(before, after) == {}
            assert after["waiting"] == 0
            statuses = [status for version in versions for status in version.pool.statuses()]
            assert [status.pid for status in statuses] == pids
            assert sum(status.losses for status in statuses) == 0
        finally:
            await server.stop()
        accepted, answered = server.ledger()
        assert accepted == answered

    asyncio.run(main())
