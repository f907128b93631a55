"""What tests of executors share: an archive folder with one handler, and a sink that remembers."""

import asyncio
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hostile_workers import OBEDIENT
from pools import pool_in_service

from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers import loss as restart
from torchere.serving.workers.executor import BatchReport, LoadSpec
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

HANDLER = """
    import os, signal, time

    class Handler:
        def initialize(self, context):
            self.initialized = True

        def handle(self, data, context):
            word = bytes(data[0]["body"]).decode()
            if word == "exit":
                os._exit(7)
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if word == "raise":
                raise ValueError("boom")
            if word == "wait":
                while not os.path.exists("go"):
                    time.sleep(0.005)
            if word == "print":
                print("said by the handler", flush=True)
            if word == "pid":
                return [str(os.getpid())] * len(data)
            return [word + "!"] * len(data)
"""


class Sink:
    """A batch and what it gave; await `report` for its end."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.parts: list[tuple[int, InferResponse]] = []
        self.report: asyncio.Future[BatchReport] = asyncio.get_running_loop().create_future()
        self.given_back: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def submit(self, pool: WorkerPool, requests: Sequence[InferRequest], **kind: Any) -> None:
        """Have a pool run the batch."""
        self.run = Run(requests, self, time.monotonic(), **kind)
        pool.submit(self.run)

    def run_part(self, run: Run, index: int, part: InferResponse) -> None:
        self.parts.append((index, part))

    def run_done(self, run: Run, report: BatchReport) -> None:
        self.report.set_result(report)  # a second call would raise InvalidStateError

    def run_returned(self, run: Run) -> None:
        self.given_back.set_result(True)

    async def outcome(self) -> Any:
        """The outcome of the only request."""
        return (await asyncio.wait_for(self.report, 30)).outcomes[0]


def request(word: str) -> InferRequest:
    return InferRequest(word, (Parameter("body", word.encode()),))


@pytest.fixture
def make_sink() -> type[Sink]:
    return Sink


@pytest.fixture
def make_request() -> Callable[[str], InferRequest]:
    return request


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., LoadSpec]:
    def make(source: str = HANDLER, **changes: Any) -> LoadSpec:
        (tmp_path / "handler.py").write_text(textwrap.dedent(source))
        return LoadSpec("demo", "1.0", str(tmp_path), "handler.py", **changes)

    return make


ONE_IS_WARM = """
    import os, time
    class Handler:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
        def warmup_data(self):
            return [{}]
        def handle(self, data, context):
            if not data[0] and not hasattr(self, "warm"):
                try:
                    os.close(os.open(os.path.join(self.folder, "first"), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    while not os.path.exists(os.path.join(self.folder, "go")):
                        time.sleep(0.005)
                self.warm = True
            while data[0] and data[0]["body"] == b"wait" and not os.path.exists(f"{self.folder}/go"):
                time.sleep(0.005)
            return ["warm"] * len(data)
"""


@pytest.fixture
def one_is_warm(make_spec: Callable[..., LoadSpec]) -> Callable[..., LoadSpec]:
    """Makes the spec of executors of which one is warm at once, and the others when a file `go` is there."""
    return lambda **changes: make_spec(ONE_IS_WARM, **changes)


@pytest.fixture
def check_first_warm(make_spec: Callable[..., LoadSpec], tmp_path: Path) -> Any:
    """Sees to it that a pool tells of its first new executor before the others are warm."""

    async def check() -> None:
        async with pool_in_service(make_spec(ONE_IS_WARM)) as pool:
            (tmp_path / "first").unlink()
            await pool.resize(3)
            pool.freed.clear()
            warming = asyncio.ensure_future(pool.warm_up())
            await asyncio.wait_for(pool.freed.wait(), 60)
            assert (pool.in_service, warming.done()) == (2, False)
            (tmp_path / "go").touch()
            await warming

    return check


@pytest.fixture(params=[True, False], ids=["lanes", "alone"])
def hostile(request: pytest.FixtureRequest, make_spec: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the spec of a worker of either kind that runs what it is sent."""
    monkeypatch.setattr(restart, "BACKOFF_S", (0.0,))
    return lambda **changes: make_spec(OBEDIENT, shares_weights=request.param, **changes)
