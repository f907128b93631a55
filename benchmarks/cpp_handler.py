"""A handler in C++ that returns each body, beside the same in Python: microseconds of a batch in a worker.

    python benchmarks/cpp_handler.py [--rounds 25]

Compiles `tests/handlers/cpp/handlers.cc`, and says how long that took. The two handlers take turns within a
round, so a busy machine slows both; each time is the fastest round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.cpp import SUFFIX, compile_flags
from torchere.handlers.metrics import MetricsCache
from torchere.handlers.resolve import EntryPoint, load_entry_point

SOURCE = Path(__file__).parents[1] / "tests" / "handlers" / "cpp" / "handlers.cc"
PYTHON = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"
SIZES = ((1, 100), (8, 100), (1, 1_000_000))  # requests of a batch, bytes of a body
HEADERS = {f"X-Header-{number}": "value" for number in range(10)}
_BATCHES_A_ROUND = 200


def compiled(folder: Path) -> float:
    """Compile the library into `folder`; return the seconds it took."""
    started_s = time.perf_counter()
    library = folder / f"libhandlers{SUFFIX}"
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", SOURCE, "-o", library, *compile_flags()], check=True)
    return time.perf_counter() - started_s


def loaded(folder: Path, handler: str, runtime: str) -> tuple[EntryPoint, Context]:
    """Load a handler as a worker does."""
    manifest = {"model": {"modelName": "m", "handler": handler}}
    context = Context("m", str(folder), manifest, 8, None, "0.12.0", metrics=MetricsCache("m"))
    return load_entry_point(handler, context, runtime=runtime), context


def call_of(entry: EntryPoint, context: Context, count: int, size: int) -> Callable[[], object]:
    """Return a function that runs one batch."""
    rows = [{"body": bytearray(size)}] * count
    headers: dict[str, Any] = {"body": {"content-type": "application/octet-stream"}, **HEADERS}

    def call() -> object:
        requests = [RequestProcessor(headers, f"request-{place}") for place in range(count)]
        context.begin_batch(requests, None)
        return entry(rows, context)

    return call


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "echo.py").write_text(PYTHON)
        print(json.dumps({"compiled in seconds": round(compiled(folder), 1)}))
        both = {
            "C++": loaded(folder, "libhandlers:Obedient", "LSP"),
            "Python": loaded(folder, "echo.py", "python"),
        }
        for count, size in SIZES:
            calls = {kind: call_of(*handler, count, size) for kind, handler in both.items()}
            fastest = dict.fromkeys(calls, float("inf"))
            for _ in range(rounds):
                for kind, call in calls.items():
                    times = max(1, _BATCHES_A_ROUND // (1 + size // 10_000))
                    fastest[kind] = min(fastest[kind], timeit.timeit(call, number=times) / times * 1e6)
            found = {kind: round(us, 1) for kind, us in fastest.items()}
            print(json.dumps({"requests": count, "bytes": size, "microseconds": found}))


if __name__ == "__main__":
    main()
