"""A worker process by its messages, and what a handler finds around it: its processes and its threads."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pools import fork_launcher, pool_in_service

from torchere.handlers.loading.weights import SharedModels
from torchere.handlers.tensors import DATATYPES, tensor_type
from torchere.serving.config.bounded_yaml import read_yaml
from torchere.serving.errors import ExecutorDied, NoRoom
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers.executor import LoadSpec, Unfinished
from torchere.serving.workers.frames import FrameReader
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.launch import (
    ExecLauncher,
    ForkLauncher,
    Launched,
    open_lanes,
)
from torchere.serving.workers.messages import (
    AddLanes,
    Done,
    Loaded,
    LoadError,
    Partial,
    Ping,
    Pong,
    Run,
    Serving,
    WarmUp,
    control_from_worker,
    data_from_worker,
    encode_frame,
    load_of,
)
from torchere.serving.workers.rank import drop_part
from torchere.serving.workers.spawn import worker_environment

SPAWNING = """
    import multiprocessing
    from ts.torch_handler.base_handler import BaseHandler

    def look(number):
        with open("handler.py") as own:
            return number * 2, "BaseHandler" in own.read()

    class Handler(BaseHandler):
        def initialize(self, context):
            with multiprocessing.get_context({!r}).Pool(1) as pool:
                self.seen = pool.apply_async(look, (21,)).get(60)

        def handle(self, data, context):
            return [self.seen] * len(data)
"""
THREADED = """
    import threading
    from ts.handler_utils.utils import send_intermediate_predict_response

    class Handler:
        def initialize(self, context): pass

        def handle(self, data, context):
            def say():
                for _ in range(8):
                    send_intermediate_predict_response([b"x" * 2**20], context.request_ids, "", 200, context)
            threads = [threading.Thread(target=say) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            return [b""]
"""


class Peer:
    """The server's end of a worker, whose messages the test sends and reads itself."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self._control = FrameReader(launched.control)
        launched.control.settimeout(60)
        self.lanes: list[socket.socket] = []
        self._readers: list[FrameReader] = []

    def open_lanes(self, count: int) -> None:
        """Give lanes that are to be loaded their data sockets."""
        for data in open_lanes(self.launched, count):
            data.settimeout(60)
            self.lanes.append(data)
            self._readers.append(FrameReader(data))

    async def run(self, message: Any, lane: int = 0) -> Any:
        """Send on the data socket of a lane and read its next message; None: only read."""
        return await asyncio.to_thread(self._exchange, self.lanes[lane], self._readers[lane], message)

    async def order(self, message: Any) -> Any:
        """Send on the control socket and read its next message; None: only read."""
        return await asyncio.to_thread(self._exchange, self.launched.control, self._control, message)

    def _exchange(self, connection: socket.socket, frames: FrameReader, message: Any) -> Any:
        if message is not None:
            connection.sendall(encode_frame(message))
        decoder: Any = control_from_worker if frames is self._control else data_from_worker
        return decoder.decode(frames.next() or b"")

    async def warm_up(self, lanes: int = 1) -> None:
        assert isinstance(await self.order(WarmUp()), Serving)
        for _ in range(lanes - 1):
            assert isinstance(await self.order(None), Serving)
        assert isinstance(await self.order(None), Loaded)


@asynccontextmanager
async def worker_of(launcher: Any, spec: LoadSpec, lanes: int = 1) -> AsyncIterator[Peer]:
    """A worker whose lanes serve the archive."""
    peer = Peer(await launcher.launch(spec.most_requests))
    launched = peer.launched
    try:
        peer.open_lanes(lanes)
        loaded = await peer.order(load_of(spec, (None,) * lanes, ""))
        assert isinstance(loaded, Loaded), loaded.detail
        await peer.warm_up(lanes)
        yield peer
    finally:
        for data in peer.lanes:
            data.close()
        launched.lanes.close()
        launched.control.close()
        await launched.output.read()
        await launched.exit_code
        launched.close()
        launched.page.close()


@asynccontextmanager
async def launcher_of(kind: Any) -> AsyncIterator[Any]:
    launcher = fork_launcher() if kind is ForkLauncher else kind(worker_environment())
    try:
        yield launcher
    finally:
        if kind is ForkLauncher:
            await launcher.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", [ForkLauncher, ExecLauncher])
def test_processes_that_a_handler_starts_find_its_module_its_files_and_ts(
    make_spec: Callable[..., LoadSpec], kind: Any, method: str
) -> None:
    async def main() -> None:
        async with (
            launcher_of(kind) as launcher,
            worker_of(launcher, make_spec(SPAWNING.format(method))) as peer,
        ):
            done = await peer.run(Run(1, 0, (InferRequest("a", ()),)))
        assert json.loads(done.outcomes[0].body) == [42, True]

    asyncio.run(main())


SHOWING = """
    class Handler:
        def initialize(self, context): self.config = context.model_yaml_config
        def handle(self, data, context): return [repr(self.config)]
"""


def test_a_handler_gets_the_dates_and_sets_of_its_model_config(
    make_spec: Callable[..., LoadSpec], tmp_path: Path
) -> None:
    text = "since: 2024-01-02\nnames: !!set {a}\n"
    (tmp_path / "c.yaml").write_text(text)
    spec = make_spec(SHOWING, manifest={"model": {"configFile": "c.yaml"}}, model_config=read_yaml(text))

    async def main() -> None:
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, spec) as peer:
            done = await peer.run(Run(1, 0, (InferRequest("a", ()),)))
        assert done.outcomes[0].body == b"{'since': datetime.date(2024, 1, 2), 'names': {'a'}}"

    asyncio.run(main())


OPTIMISED = """
    import os, torch
    from torchere.archiver.torchscript_options import TorchScriptOptions
    from torchere.handlers.loading.torchscript import load_torchscript

    class Handler:
        def initialize(self, context):
            layers = torch.nn.Sequential(torch.nn.Linear(4096, 4200), torch.nn.Linear(4200, 2))
            torch.jit.script(layers.eval()).save("net.pt")
            options = TorchScriptOptions(optimize_for_inference=True)
            self.graph = load_torchscript(os.path.abspath("net.pt"), "cpu", options).graph

        def handle(self, data, context):
            kinds = "aten::linear", "mkldnn::_linear_pointwise"
            return [[len(self.graph.findAllNodes(kind)) for kind in kinds]]
"""


def test_a_worker_leaves_large_weights_in_the_file_that_all_workers_share(
    make_spec: Callable[..., LoadSpec],
) -> None:
    async def main() -> None:
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, make_spec(OPTIMISED)) as peer:
            done = await peer.run(Run(1, 0, (InferRequest("a", ()),)))
        assert json.loads(done.outcomes[0].body) == [1, 1]  # 66 MiB are not packed

    asyncio.run(main())


@pytest.mark.parametrize("shares_weights", [True, False])
def test_parts_that_several_threads_send_at_once_stay_whole(
    make_spec: Callable[..., LoadSpec], shares_weights: bool
) -> None:
    async def main() -> None:
        spec = make_spec(THREADED, shares_weights=shares_weights)
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, spec) as peer:
            message = await peer.run(Run(1, 0, (InferRequest("a", ()),)))
            parts = []
            while not isinstance(message, Done):
                assert isinstance(message, Partial)
                parts.append(bytes(message.part.body))
                message = await peer.run(None)
        assert parts == [b"x" * 2**20] * 32

    asyncio.run(main())


TELLING = """
    import os, threading, time
    class Handler:
        def initialize(self, context):
            if os.path.exists("refuse"):
                raise RuntimeError("refused")
        def handle(self, data, context):
            if bytes(data[0].get("body", b"")) == b"wait":
                while not os.path.exists("go"):
                    time.sleep(0.005)
            own = threading.current_thread() is threading.main_thread()
            return [[os.getpid(), own, threading.active_count()]] * len(data)
"""


def request(word: bytes = b"x") -> InferRequest:
    return InferRequest("a", (Parameter("body", word),))


def test_a_single_lane_is_the_main_thread_and_has_no_other_beside_it(
    make_spec: Callable[..., LoadSpec],
) -> None:
    async def main() -> None:
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, make_spec(TELLING)) as peer:
            done = await peer.run(Run(1, 0, (request(),)))
            assert json.loads(done.outcomes[0].body) == [peer.launched.pid, True, 1]

    asyncio.run(main())


@pytest.mark.parametrize("shares_weights", [True, False])
def test_batches_that_were_sent_ahead_are_answered_in_their_order(
    make_spec: Callable[..., LoadSpec], shares_weights: bool
) -> None:
    async def main() -> None:
        spec = make_spec(TELLING, shares_weights=shares_weights)
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, spec) as peer:
            ahead = b"".join(encode_frame(Run(number, number, (request(),))) for number in range(1, 9))
            peer.lanes[0].sendall(ahead)
            answers = [await peer.run(None) for _ in range(8)]
            assert [answer.run_id for answer in answers] == list(range(1, 9))

    asyncio.run(main())


def test_lanes_answer_a_ping_while_all_are_busy(make_spec: Callable[..., LoadSpec], tmp_path: Path) -> None:
    async def main() -> None:
        spec = make_spec(TELLING, shares_weights=True)
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, spec) as peer:
            running = asyncio.ensure_future(peer.run(Run(1, 0, (request(b"wait"),))))
            assert isinstance(await peer.order(Ping()), Pong)
            (tmp_path / "go").touch()
            assert isinstance(await running, Done)

    asyncio.run(main())


def test_lanes_are_added_while_others_serve_and_one_whose_socket_closes_ends(
    make_spec: Callable[..., LoadSpec], tmp_path: Path
) -> None:
    async def main() -> None:
        spec = make_spec(TELLING, shares_weights=True)
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, spec) as peer:
            running = asyncio.ensure_future(peer.run(Run(1, 0, (request(b"wait"),))))
            (tmp_path / "refuse").touch()
            peer.open_lanes(1)
            failed = await peer.order(AddLanes((None,)))
            assert isinstance(failed, LoadError)
            assert "refused" in failed.detail
            (tmp_path / "refuse").unlink()
            peer.open_lanes(2)
            assert isinstance(await peer.order(AddLanes((None, None))), Loaded)
            await peer.warm_up(2)
            assert (await peer.run(Run(2, 1, (request(),)), lane=2)).run_id == 2
            for lane in (2, 3):
                peer.lanes[lane].shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(peer.lanes[lane].recv, 1) == b""  # it has closed its end
            (tmp_path / "go").touch()
            assert isinstance(await running, Done)
            assert (await peer.run(Run(3, 0, (request(),)))).run_id == 3

    asyncio.run(main())


@pytest.mark.parametrize("shares_weights", [True, False])
def test_a_worker_marks_what_it_begins_in_the_page(
    make_spec: Callable[..., LoadSpec], tmp_path: Path, shares_weights: bool
) -> None:
    async def main() -> None:
        spec = make_spec(TELLING, shares_weights=shares_weights)
        async with launcher_of(ForkLauncher) as launcher, worker_of(launcher, spec) as peer:
            page = peer.launched.page
            assert page.begun(1) == {}
            running = asyncio.ensure_future(peer.run(Run(17, 0, (request(b"wait"),))))
            while not page.begun(1):
                await asyncio.sleep(0.005)
            assert list(page.begun(1)) == [17]
            (tmp_path / "go").touch()
            assert isinstance(await running, Done)

    asyncio.run(main())


GOING_ON = """
    import numpy as np
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            context.stopping_criteria = {}
            return [b"part"] * len(data)
"""


@pytest.mark.parametrize(
    "criteria",
    [
        "[lambda answer: False, lambda answer: True, lambda answer: None]",
        "[lambda answer: np.bool_(False), lambda answer: np.bool_(True), lambda answer: None]",
        "{0: lambda answer: 0, 1: lambda answer: 1, 2: lambda answer: None}",
    ],
)
def test_a_request_goes_on_when_the_criterion_at_its_index_says_anything_false(
    make_spec: Callable[..., LoadSpec], criteria: str
) -> None:
    host = HandlerHost(make_spec(GOING_ON.replace("{}", criteria)), None, SharedModels())
    host.load()

    outcomes = host.run(
        [InferRequest(name, (Parameter("body", b"x"),)) for name in "abc"], drop_part
    ).outcomes

    assert [type(outcome) for outcome in outcomes] == [Unfinished, InferResponse, InferResponse]


LOOKING = """
    import json, multiprocessing, os, sys
    import __main__

    def double(number):
        import __main__ as own
        return 2 * number, hasattr(own, "ForkServer") or hasattr(own, "WorkerMain")

    class Handler:
        def initialize(self, context): __main__.Net = Handler  # as for a checkpoint of a training script
        def handle(self, data, context):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                doubled = pool.apply(double, (21,))
            names = [name for name in vars(__main__) if not name.startswith("__")]
            return [json.dumps({
                "names": names, "same": sys.modules["__main__"] is __main__,
                "is_file": os.path.isfile(__main__.__file__), "argv": sys.argv, "orig_argv": sys.orig_argv,
                "doubled": doubled, "ours": [name for name in os.environ if "TORCHERE" in name],
            })]
"""


@pytest.mark.parametrize("kind", [ForkLauncher, ExecLauncher])
def test_model_code_sees_no_launcher_in_its_main_module_its_arguments_and_its_variables(
    make_spec: Callable[..., LoadSpec], kind: Any
) -> None:
    async def main() -> None:
        async with launcher_of(kind) as launcher, worker_of(launcher, make_spec(LOOKING)) as peer:
            done = await peer.run(Run(1, 0, (InferRequest("a", ()),)))
        assert json.loads(done.outcomes[0].body) == {
            "names": ["Net"],
            "same": True,
            "is_file": True,
            "argv": [""],
            "orig_argv": [sys.executable],
            "doubled": [42, False],
            "ours": [],
        }

    asyncio.run(main())


LIMITED = """
    import ctypes, resource

    class Handler:
        borrows_tensors = True

        def initialize(self, context):
            ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks go back when freed
            with open("/proc/self/status") as status:
                used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
            most = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (used + 200 * 2**20, most))

        def handle(self, data, context):
            return [str(len(row["body"])) for row in data]
"""
MIB = 2**20
LANES: dict[str, Any] = {"shares_weights": True}
BESIDE: dict[str, Any] = {"at_once": 8}


def sized(size: int) -> InferRequest:
    tensor = tensor_type(DATATYPES["UINT8"], [size])
    return InferRequest(str(size), (Parameter("body", bytes(size), tensor),))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("kind", "size"),
    [({}, 120 * MIB), (LANES, 120 * MIB), (BESIDE, 60 * MIB)],  # beside others a handler gets a copy
    ids=["alone", "lanes", "beside"],
)
def test_a_request_for_which_a_worker_lacks_memory_is_answered_and_the_worker_stays(
    make_spec: Callable[..., LoadSpec], make_sink: Any, kind: dict[str, Any], size: int
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(LIMITED, **kind)) as pool:

            async def outcomes(*sizes: int) -> list[Any]:
                sink = make_sink()
                sink.submit(pool, [sized(each) for each in sizes])
                return list((await asyncio.wait_for(sink.report, 30)).outcomes)

            for each in (size, size, 300 * MIB, size, 5):
                (outcome,) = await outcomes(each)
                assert isinstance(outcome, NoRoom if each == 300 * MIB else InferResponse)
            if kind != BESIDE:
                small, large = await outcomes(5, 300 * MIB)
                assert isinstance(small, NoRoom) and isinstance(large, NoRoom)
            assert [status.losses for status in pool.statuses()] == [0]

    asyncio.run(main())


KILLED_WHILE_IT_RECEIVES = """
    import os, signal
    from torchere.serving.workers import frames

    class Handler:
        def initialize(self, context):
            frames.room_for = lambda size: os.kill(os.getpid(), signal.SIGKILL)

        def handle(self, data, context):
            return ["fine"] * len(data)
"""


@pytest.mark.parametrize("kind", [{}, LANES, BESIDE], ids=["alone", "lanes", "beside"])
def test_a_request_whose_values_cost_a_worker_is_not_given_to_the_next_one(
    make_spec: Callable[..., LoadSpec], make_sink: Any, kind: dict[str, Any]
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(KILLED_WHILE_IT_RECEIVES, **kind)) as pool:
            sink = make_sink()
            sink.submit(pool, [sized(5 * MIB)])
            assert isinstance(await sink.outcome(), ExecutorDied)
            assert not sink.given_back.done()

    asyncio.run(main())
