"""What tests of several folders share: where the repository is, and the tools of deploy/tools.sh."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# How long an example takes says something of the machine's minute, nothing of the code.
settings.register_profile("without timing", deadline=None)
settings.load_profile("without timing")

ROOT = Path(__file__).resolve().parents[1]

# The folders and files of `make unit`: no process and no listening port.
UNIT = tuple(
    f"tests/{path}"
    for path in (
        "archiver/container/",
        "archiver/scan/",
        "client/",
        "fuzz/",
        "handlers/audio/",
        "handlers/loading/",
        "handlers/tensors/",
        "handlers/text/",
        "handlers/vision/",
        "serving/access/",
        "serving/batching/",
        "serving/config/",
        "serving/frontend/open_inference/",
        "serving/io/",
        "serving/logs/",
        "serving/registry/",
        "serving/telemetry/",
    )
)
# Files in those folders that start a process or listen on a port.
NOT_UNIT = tuple(
    f"tests/{path}"
    for path in (
        "client/test_deadlines.py",
        "client/test_sockets.py",
        "client/test_tensors.py",
        "handlers/loading/test_xla.py",
        "serving/access/test_tls.py",
        "serving/io/test_addresses.py",
        "serving/io/test_turn_writes.py",
        "serving/logs/test_access_lines.py",
        "serving/logs/test_output.py",
        "serving/registry/test_registry.py",
        "serving/registry/test_remote_weights.py",
        "serving/registry/test_signed_registration.py",
        "serving/telemetry/test_server.py",
        "serving/telemetry/test_system_metrics.py",
        "serving/telemetry/test_tracing.py",
    )
)
# Files of `make test` that run in one process, because they share a session fixture that takes long: the
# replay of all recorded requests, the server of all clients, a model or a library that is compiled.
TOGETHER = (
    ("tests/conformance/test_grpc.py", "tests/conformance/test_rest.py"),
    ("tests/clients/",),
    ("tests/handlers/compiled/test_load.py", "tests/handlers/test_base.py"),
    ("tests/e2e/test_cpp_handlers.py", "tests/e2e/test_sandbox.py"),
)
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
events: list[str] = []  # audit events of the running unit test that break its promise


def record_starts(event: str, arguments: tuple[object, ...]) -> None:
    """Record the start of a process, and the binding of an internet socket."""
    if event in STARTS or (event == "socket.bind" and isinstance(arguments[1], tuple)):
        events.append(event)


sys.addaudithook(record_starts)

TOOLS = (ROOT / ".tools/bin", ROOT / ".tools/venv/bin")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this machine, but for `-m gpu`: what tests expect, and recordings hold, is a CPU's."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    catch_ignored_signals()


def catch_ignored_signals() -> None:
    """Give the processes that tests start the default actions, also under nohup or in the background.

    An ignored signal is inherited by new programs, and a caught one is not.
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        """Go on, as with the signal ignored."""

    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, ignore)


leave_process = subprocess.Popen.__exit__


def end_process(
    process: subprocess.Popen[Any],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Kill the process of a `with` block that fails, also by its time limit: it would be waited for."""
    if error is not None and process.poll() is None:
        process.kill()
    leave_process(process, kind, error, trace)


subprocess.Popen.__exit__ = end_process  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without garbage collection, which takes half of the time.

    All objects of now are left out of later collections as well: they live as long as the process, and a
    full collection of them takes 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a test with binary data after the argument: the header of gzip, for one, differs each second.

    The processes that share the tests must collect the same names.
    """
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make unit`, by their folder."""
    for item in items:
        if item.nodeid.startswith(UNIT) and not item.nodeid.startswith(NOT_UNIT):
            item.add_marker("unit")


class FileScheduling(LoadFileScheduling):
    """Runs the tests of a file, or of the files that are listed together, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((group[0] for group in TOGETHER if file.startswith(group)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Return the scheduler of `--dist loadfile`."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def unit_tests_start_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that starts a process or listens on a port."""
    events.clear()
    yield
    if events and request.node.get_closest_marker("unit"):
        pytest.fail(f"a unit test caused {', '.join(events)}; list its file in NOT_UNIT of tests/conftest.py")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Finds a tool in .tools or on PATH; skips the test when there is none."""

    def find(name: str) -> str:
        found = shutil.which(name, path=os.pathsep.join([*map(str, TOOLS), os.environ["PATH"]]))
        if found is None:
            pytest.skip(f"{name} is not installed: `make tools` fetches it")
        return found

    return find
