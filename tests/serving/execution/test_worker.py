"""What a handler finds around it in a worker process: the processes it starts, and threads that answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.shared_models import SharedModels
from torchere.serving.bounded_yaml import read_yaml
from torchere.serving.execution.executor import LoadSpec, Unfinished
from torchere.serving.execution.frames import FrameReader
from torchere.serving.execution.host import HandlerHost
from torchere.serving.execution.launch import ExecLauncher, ForkLauncher, worker_environment
from torchere.serving.execution.wire import Done, Partial, Run, encode_frame, from_worker_decoder, load_of
from torchere.serving.types import InferRequest, InferResponse, Parameter

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


@asynccontextmanager
async def worker_of(launcher: Any, spec: LoadSpec) -> AsyncIterator[Callable[[Any], Any]]:
    """A worker that has loaded the archive, by what sends it a message, if any, and reads its next one."""
    launched = await launcher.launch()
    frames = FrameReader(launched.connection)
    launched.connection.settimeout(60)

    def exchange(message: Any) -> Any:
        if message is not None:
            launched.connection.sendall(encode_frame(message))
        return from_worker_decoder.decode(frames.next() or b"")

    try:
        loaded = await asyncio.to_thread(exchange, load_of(spec, None, ""))
        assert not hasattr(loaded, "detail"), loaded.detail
        yield lambda message: asyncio.to_thread(exchange, message)
    finally:
        launched.connection.close()
        await launched.output.read()
        await launched.exit_code
        launched.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", [ForkLauncher, ExecLauncher])
def test_processes_that_a_handler_starts_find_its_module_its_files_and_ts(
    make_spec: Callable[..., LoadSpec], kind: Any, method: str
) -> None:
    async def main() -> None:
        launcher = kind(worker_environment())
        try:
            async with worker_of(launcher, make_spec(SPAWNING.format(method))) as exchange:
                done = await exchange(Run(1, (InferRequest("a", ()),)))
        finally:
            if kind is ForkLauncher:
                await launcher.close()
        assert json.loads(done.outcomes[0].response.body) == [42, True]

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
        async with worker_of(ExecLauncher(worker_environment()), spec) as exchange:
            done = await exchange(Run(1, (InferRequest("a", ()),)))
        assert done.outcomes[0].response.body == b"{'since': datetime.date(2024, 1, 2), 'names': {'a'}}"

    asyncio.run(main())


OPTIMISED = """
    import os, torch
    from torchere.archiver.torchscript_options import TorchScriptOptions
    from torchere.handlers.torchscript import load_torchscript

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
        async with worker_of(ExecLauncher(worker_environment()), make_spec(OPTIMISED)) as exchange:
            done = await exchange(Run(1, (InferRequest("a", ()),)))
        assert json.loads(done.outcomes[0].response.body) == [1, 1]  # 66 MiB are not packed

    asyncio.run(main())


def test_parts_that_several_threads_send_at_once_stay_whole(make_spec: Callable[..., LoadSpec]) -> None:
    async def main() -> None:
        async with worker_of(ExecLauncher(worker_environment()), make_spec(THREADED)) as exchange:
            message = await exchange(Run(1, (InferRequest("a", ()),)))
            parts = []
            while not isinstance(message, Done):
                assert isinstance(message, Partial)
                parts.append(bytes(message.part.body))
                message = await exchange(None)
        assert parts == [b"x" * 2**20] * 32

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

    outcomes = host.run([InferRequest(name, (Parameter("body", b"x"),)) for name in "abc"], None).outcomes

    assert [type(outcome) for outcome in outcomes] == [Unfinished, InferResponse, InferResponse]
