"""Both ways of starting a worker give the same worker; the fork server starts before the server."""

import asyncio
import fcntl
import gc
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import uvloop
from fakes import COUNTS_QUESTIONS_FOR_GPUS
from pools import new_pool

from torchere.serving.workers import fork_server
from torchere.serving.workers.launch import (
    CompilerLauncher,
    ExecLauncher,
    ForkLauncher,
    Launched,
    Launcher,
    _launched,
)
from torchere.serving.workers.loss import Loss, LossKind
from torchere.serving.workers.spawn import Spawned, spawn, worker_environment

LAUNCHERS = {"fork": ForkLauncher, "exec": ExecLauncher}


def run_with(kind: str, test: Any) -> None:
    async def main() -> None:
        launcher = LAUNCHERS[kind](worker_environment())
        try:
            await test(launcher)
        finally:
            if isinstance(launcher, ForkLauncher):
                await launcher.close()

    asyncio.run(main())


def close_sockets(worker: Launched) -> None:
    worker.lanes.close()
    worker.control.close()
    worker.page.close()


async def end(worker: Launched) -> int:
    """Close the server's ends of the sockets and wait for the worker."""
    close_sockets(worker)
    code = await asyncio.wait_for(worker.exit_code, 60)
    await worker.output.read()
    worker.close()
    return code


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_worker_ends_by_itself_when_its_sockets_close(kind: str) -> None:
    async def test(launcher: Any) -> None:
        worker = await launcher.launch(1)
        assert worker.pid != os.getpid()
        assert await end(worker) == 0

    run_with(kind, test)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_killed_worker_tells_the_signal(kind: str) -> None:
    async def test(launcher: Any) -> None:
        worker = await launcher.launch(1)
        worker.kill(Loss(LossKind.STOPPED, "stopped"))
        assert await end(worker) == -signal.SIGKILL

    run_with(kind, test)


def test_nothing_of_a_worker_stays_open_while_what_it_has_started_lives(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 1000 &\necho $!\n")
    python.chmod(0o755)

    async def main() -> None:
        open_before = psutil.Process().num_fds()
        worker = await ExecLauncher(worker_environment(), str(python)).launch(1)
        left_behind = int(await asyncio.wait_for(worker.output.readline(), 60))
        try:
            assert await asyncio.wait_for(worker.exit_code, 60) == 0
            close_sockets(worker)
            worker.close()
            await asyncio.sleep(0)
            assert psutil.Process().num_fds() == open_before
        finally:
            os.kill(left_behind, signal.SIGKILL)

    asyncio.run(main())


class _SlowToClose(io.FileIO):
    """A file that is closed while another thread opens one, which gets the number if it is free already."""

    opened_meanwhile: ClassVar[list[int]] = []

    def close(self) -> None:
        if not self.closed:
            with open(os.devnull) as devnull:
                self.opened_meanwhile.append(fcntl.fcntl(devnull, fcntl.F_DUPFD, self.fileno()))
        super().close()


async def _started(descriptors: Sequence[int], output: int) -> tuple[int, asyncio.Future[int]]:
    exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    exit_code.set_result(0)
    return 1, exit_code


async def _refused(descriptors: Sequence[int], output: int) -> tuple[int, asyncio.Future[int]]:
    raise OSError("no process left")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("ends_first", ["worker", "server"])
def test_the_ends_of_200_workers_close_no_descriptor_of_another_thread(
    run: Any, ends_first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fdopen(descriptor: int, mode: str, buffering: int, **more: Any) -> _SlowToClose:
        return _SlowToClose(descriptor, mode, **more)

    opened: list[int] = []
    monkeypatch.setattr(os, "fdopen", fdopen)
    monkeypatch.setattr(_SlowToClose, "opened_meanwhile", opened)

    async def end_one() -> None:
        worker = await _launched(_started, 1)  # its end of the pipe is closed
        if ends_first == "worker":
            await worker.output.read()
        worker.close()
        close_sockets(worker)
        await asyncio.sleep(0)

    async def main() -> int:
        await end_one()  # a loop opens descriptors of its own
        before = psutil.Process().num_fds()
        for _ in range(199):
            await end_one()
        return psutil.Process().num_fds() - before

    try:
        more_open = run(main())
        taken_away = [descriptor for descriptor in opened if not _is_devnull(descriptor)]
        assert (len(opened), taken_away) == (200, [])
        assert more_open == 199  # the files that were opened meanwhile, and nothing of a worker
    finally:
        for descriptor in set(filter(_is_devnull, opened)):
            os.close(descriptor)


def _is_devnull(descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
    except OSError:
        return False


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_worker_that_can_not_be_started_leaves_nothing_open(run: Any) -> None:
    async def main() -> int:
        with pytest.raises(OSError, match="no process left"):
            await _launched(_refused, 1)  # a loop opens descriptors of its own
        await asyncio.sleep(0.05)
        before = psutil.Process().num_fds()
        with pytest.raises(OSError, match="no process left"):
            await _launched(_refused, 1)
        for _ in range(200):  # a transport closes its pipe in a turn of its own
            if psutil.Process().num_fds() == before:
                break
            await asyncio.sleep(0.01)
        return psutil.Process().num_fds() - before

    assert run(main()) == 0


def test_workers_of_a_lost_fork_server_are_lost_and_the_next_launch_starts_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(launcher: ForkLauncher) -> None:
        first = await launcher.launch(1)
        fork_server = launcher._fork_server
        assert fork_server is not None
        os.kill(fork_server._process.pid, signal.SIGKILL)
        assert await end(first) == -signal.SIGKILL
        assert f"and all workers with it: process {fork_server._process.pid}" in caplog.text
        await asyncio.to_thread(fork_server._process.wait)
        second = await launcher.launch(1)
        assert await end(second) == 0

    run_with("fork", test)


def test_a_process_that_was_spawned_before_is_forked_from() -> None:
    environment = worker_environment()
    spawned = spawn(environment)

    async def main() -> None:
        launcher = ForkLauncher(environment, spawned)
        worker = await launcher.launch(1)
        assert psutil.Process(worker.pid).ppid() == spawned.process.pid
        assert await end(worker) == 0
        await launcher.close()

    asyncio.run(main())
    assert spawned.process.poll() is not None


def test_a_spawned_process_that_nobody_used_is_ended_with_the_launcher() -> None:
    environment = worker_environment()
    spawned = spawn(environment)

    async def main() -> None:
        await ForkLauncher(environment, spawned).close()

    asyncio.run(main())
    assert spawned.process.poll() is not None
    spawned.end()


def test_more_workers_than_a_fork_server_can_be_asked_for_at_once_wait_for_their_turn() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        still_importing = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        launcher = ForkLauncher(worker_environment(), Spawned(still_importing, ours))
        launches = [asyncio.ensure_future(launcher.launch(1)) for _ in range(400)]
        for _ in range(10):
            await asyncio.sleep(0)
        failures = [launch.exception() for launch in launches if launch.done()]
        for launch in launches:
            launch.cancel()
        await asyncio.gather(*launches, return_exceptions=True)
        await launcher.close()
        theirs.close()
        still_importing.communicate()
        assert failures == []

    asyncio.run(main())


SAYS_WHAT_IS_IMPORTED = """
    import sys
    class Handler:
        def initialize(self, context):
            with open(context.system_properties["model_dir"] + "/found", "w") as found:
                found.write(" ".join(set(sys.modules) & {"torch._dynamo", "wsgiref.headers"}))
        def handle(self, data, context):
            return ["done"] * len(data)
"""


@pytest.fixture
def imported(make_spec: Any, tmp_path: Path) -> Callable[[Launcher], Awaitable[str]]:
    """Starts a worker; returns which of two modules it has imported when it loads its handler."""

    async def found(launcher: Launcher) -> str:
        pool = new_pool(make_spec(SAYS_WHAT_IS_IMPORTED), launcher)
        await pool.resize(1)
        await pool.warm_up()
        await pool.close()
        return (tmp_path / "found").read_text()

    return found


def test_only_workers_of_models_that_need_the_compiler_find_it_imported(imported: Any) -> None:
    async def test(launcher: ForkLauncher) -> None:
        assert await imported(launcher) == ""
        assert await imported(CompilerLauncher(launcher)) == "torch._dynamo"
        assert await imported(CompilerLauncher(launcher)) == "torch._dynamo"

    run_with("fork", test)


def test_workers_share_the_modules_that_the_operator_names(imported: Any) -> None:
    async def main() -> None:
        launcher = ForkLauncher(worker_environment(), modules=("wsgiref.headers",))
        try:
            assert await imported(launcher) == "wsgiref.headers"
        finally:
            await launcher.close()

    asyncio.run(main())


# Each folder has a module `bad`, and is for a process of its own, which is forked behind the import of torch.
PRELOADS = """
import os, sys
from torchere.serving.workers.fork_server import preload
for folder in sys.argv[1:]:
    if os.fork() == 0:
        os.dup2(os.open(folder + "/said", os.O_CREAT | os.O_WRONLY), 2)
        sys.path.insert(0, folder)
        preload(["bad", "wsgiref.headers"])
        assert "wsgiref.headers" in sys.modules and "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
        open(folder + "/went_well", "w").close()
        os._exit(0)
    os.wait()
"""
WRONG = {
    "raise OSError('no licence')": (
        "bad can't be imported (OSError('no licence')); workers import it themselves"
    ),
    "raise SystemExit(3)": "bad can't be imported (SystemExit(3)); workers",
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()": "bad starts",
    "import torch\ntorch.cuda.is_initialized = lambda: True": "bad uses a GPU when imported",
    "import os\nassert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'": "",
}


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each module of `WRONG`, behind its import: `said`, and `went_well` if it did."""
    folders = {source: tmp_path_factory.mktemp("preloaded") for source in WRONG}
    for source, folder in folders.items():
        (folder / "bad.py").write_text(source)
    subprocess.run([sys.executable, "-c", PRELOADS, *map(str, folders.values())], check=True)
    return folders


@pytest.mark.parametrize("source", WRONG)
def test_what_is_wrong_with_a_shared_module_is_told_and_the_others_are_imported(
    preloaded: dict[str, Path], source: str
) -> None:
    folder, told = preloaded[source], WRONG[source]
    said = (folder / "said").read_text()
    assert (folder / "went_well").exists(), said
    assert said.startswith(f"preload_modules: {told}" if told else "")
    assert said.count("\n") == bool(told)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_shared_module_that_ends_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    environment, names = worker_environment(), ("wsgiref.headers", "ends", "json")
    spawned = spawn(environment, names)
    if asked == "after":
        assert spawned.process.wait(60) == 7

    async def main() -> None:
        launcher = ForkLauncher(environment, spawned, names)
        said = "the fork server was lost while it imported ends: take it out of preload_modules"
        try:
            with pytest.raises(OSError, match=said):
                await launcher.launch(1)
        finally:
            await launcher.close()

    asyncio.run(main())


def test_a_fork_server_that_is_lost_later_blames_no_shared_module() -> None:
    async def main() -> None:
        launcher = ForkLauncher(worker_environment(), modules=("wsgiref.headers",))
        try:
            assert await end(await launcher.launch(1)) == 0
            forks = launcher._fork_server
            assert forks is not None
            forks._lose()
            with pytest.raises(OSError, match=r"the fork server is lost$"):
                await forks.fork([], 0)
        finally:
            await launcher.close()

    asyncio.run(main())


def test_a_fork_server_without_the_compiler_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails_to_import.py").write_text(
        "import os\nos.environ['SET_HERE'] = '1'\nraise OSError('disk full')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("torch.no_such_module", "fails_to_import", "torch._export.serde.serialize")
    monkeypatch.setattr(fork_server, "COMPILER", names)
    fork_server.import_compiler.cache_clear()
    fork_server.import_compiler()
    assert "torch._export.serde.serialize" in sys.modules
    assert "SET_HERE" not in os.environ
    assert gc.isenabled()
    said = "torch's compiler can't be imported ahead of the workers: OSError('disk full')\n"
    assert capfd.readouterr().err == said


# Each computes with two threads in the forked process, as a worker does.
COMPUTES = """
import os, signal, sys, torch
from torchere.serving.workers.fork_server import preload
preload(["computes"])
print(torch.get_num_threads(), flush=True)
if os.fork() == 0:
    signal.alarm(20)
    torch.ones(800, 800) @ torch.ones(800, 800)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_workers_compute_after_a_shared_module_has_computed(tmp_path: Path) -> None:
    (tmp_path / "computes.py").write_text("import torch\ntorch.ones(800, 800) @ torch.ones(800, 800)\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COMPUTES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


IMPORTS_THE_COMPILER = (
    COUNTS_QUESTIONS_FOR_GPUS
    + """
from torchere.serving.workers.fork_server import import_compiler
from torchere.serving.workers.spawn import Spawned, fork_server_ahead, spawn, worker_environment

import_compiler()
assert "torch._dynamo" in sys.modules
assert (asked, threading.active_count()) == ([], 1)
"""
)


def test_the_import_of_the_compiler_asks_for_no_gpu_and_starts_no_thread() -> None:
    command = [sys.executable, "-c", IMPORTS_THE_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
