"""JSON of answers and requests: our functions beside those they call and Python's `json`.

    python benchmarks/json_text.py [--rounds 25]

Prints microseconds a call, each the fastest round, for lists of 64 and of 1,000 floats. The functions take
turns within a round, so a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import timeit
from collections.abc import Callable

import msgspec
import numpy as np
import orjson

from torchere.handlers.encode import encode_answer, one_line_json, parse_json
from torchere.handlers.tensors import DATATYPES
from torchere.handlers.tensors.codec import json_from_tensor

SIZES = (64, 1000)
_FLOATS_A_ROUND = 20_000


def calls(size: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    numbers = random.Random(1)
    floats = [numbers.uniform(-5.0, 5.0) for _ in range(size)]
    text = json.dumps(floats).encode()
    array = np.array(floats, np.float32)
    return {
        "answer: encode_answer": lambda: encode_answer(floats),
        "answer: orjson alone": lambda: orjson.dumps(floats, option=orjson.OPT_INDENT_2),
        "answer: json.dumps": lambda: json.dumps(floats, indent=2),
        "answer with a null: encode_answer": lambda: encode_answer([*floats, None]),
        "answer with NaN: encode_answer": lambda: encode_answer([*floats, float("nan")]),
        "one line: one_line_json": lambda: one_line_json(floats),
        "one line: json.dumps": lambda: json.dumps(floats),
        "FP32 tensor: json_from_tensor": lambda: json_from_tensor(array, DATATYPES["FP32"], "x"),
        "request: parse_json": lambda: parse_json(text),
        "request: msgspec alone": lambda: msgspec.json.decode(text),
        "request: orjson alone": lambda: orjson.loads(text),
        "request: json.loads": lambda: json.loads(text),
    }


def measured(rounds: int) -> dict[str, list[float]]:
    """Microseconds a call by name, one for each of `SIZES`."""
    found: dict[str, list[float]] = {}
    for size in SIZES:
        times = _FLOATS_A_ROUND // size
        every = calls(size)
        fastest = dict.fromkeys(every, float("inf"))
        for _ in range(rounds):
            for name, call in every.items():
                fastest[name] = min(fastest[name], timeit.timeit(call, number=times) / times * 1e6)
        for name, us in fastest.items():
            found.setdefault(name, []).append(us)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    print(f"{'µs a call':<40}" + "".join(f"{size:>10} floats" for size in SIZES))
    for name, times in measured(rounds).items():
        print(f"{name:<40}" + "".join(f"{us:>17.2f}" for us in times))


if __name__ == "__main__":
    main()
