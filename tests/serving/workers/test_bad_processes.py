"""What handlers do to the state of their process, and how they hang: the worker answers again behind it.

`docs/bad-inputs.md` names these tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from hostile_workers import HANGS, rig_of

from torchere.serving.errors import DeadlineExceeded

CHANGES = {
    "the folder": "import tempfile; os.chdir(tempfile.mkdtemp())",
    "a folder that goes": "import tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "the environment": "os.environ.clear()",
    "the mask of files": "os.umask(0o777)",
    "the locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "handlers of signals": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 13, 14, 15, 17)]",
    "the search path": "sys.path.clear(); sys.path_hooks.clear(); sys.meta_path.clear()",
    "modules": "[sys.modules.pop(n, None) for n in ('json', 'msgspec', 'logging', 'asyncio', 'torch.nn')]",
    "warnings": "import warnings; warnings.simplefilter('error')",
    "logging": "import logging; logging.disable(100); logging.getLogger().handlers.clear()",
    "streams": "sys.stdout = sys.stderr = sys.stdin = None",
    "random numbers": "import random; random.seed(0); random.setstate(random.getstate())",
    "torch": "import torch; torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)",
    "threads of torch": "import torch; torch.set_num_threads(64)",
    "hooks": "sys.excepthook = threading.excepthook = None",
    "the collector": "import gc; gc.disable(); gc.set_threshold(1)",
    "standard input": "os.close(0)",
    "standard output": "os.close(1)",
    "standard error": "os.close(2)",
    "binary output": "os.write(1, os.urandom(65536))",
    "a thread that goes on": "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "a process that goes on": "import subprocess; subprocess.Popen(['sleep', '5'])",
    "memory": "globals().setdefault('kept', []).append(bytearray(2**20))",
}


def test_a_handler_may_change_all_of_its_process(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(), **HANGS) as rig:
            for name, source in CHANGES.items():
                await rig.run(source)
                await rig.answers_again()
                assert rig.loop_went_on, name

    asyncio.run(main())


HANG = {
    "a loop": "while True: pass",
    "a loop in C that keeps the GIL": "ctypes.PyDLL(None).sleep(3600)",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a stopped process": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(3600)",
    "a wait for a signal": "signal.pause()",
}


def test_a_handler_that_hangs_in_any_way_is_replaced(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(), **HANGS) as rig:
            for name, source in HANG.items():
                before = rig.pid
                assert isinstance(await rig.run(source), DeadlineExceeded), name
                await rig.answers_again()
                assert rig.pid != before
                assert rig.loop_went_on, name

    asyncio.run(main())


def test_a_stopped_worker_that_is_let_go_before_its_time_out_answers(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            await rig.answers_again()
            before = rig.pid
            os.kill(before, signal.SIGSTOP)
            run = rig.submit("pass")
            os.kill(before, signal.SIGCONT)
            assert (await rig.ledger.report(run)).outcomes[0].body == b"done"
            assert rig.pid == before

    asyncio.run(main())
