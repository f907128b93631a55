"""Fuzz targets with atheris, each for a time, and print what each did.

    python tests/fuzz/run.py --seconds 60 [TARGET ...]

A finding is written to `tests/fuzz/found/TARGET-HASH`, where `test_found.py` runs it, and ends with status 1.
Inputs that reached new code are kept in `.fuzz/TARGET`, and the next run begins with them.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import operator
import os
import re
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "tests/fuzz/found"
CORPUS = ROOT / ".fuzz"
MOST_RSS_MB = 2048
MOST_GROWTH_MB = 256  # the fuzzer itself keeps its inputs and features
_FIGURES = re.compile(r"#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+) corp: .*?rss: (\d+)Mb")
INSTRUMENTED = ["fuzz", "torchere", "hpack", "yaml", "python_multipart", "zipfile", "tarfile"]


def main() -> int:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    if arguments.inside:
        fuzz(arguments.targets[0], arguments.seconds)
        return 0
    from fuzz.targets import TARGETS

    failed = [name for name in arguments.targets or TARGETS if not _outside(name, arguments.seconds)]
    print(f"findings: {', '.join(failed) or 'none'}")
    return bool(failed)


def _outside(name: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own, since libFuzzer ends its process; print its figures."""
    CORPUS.mkdir(exist_ok=True)
    log = CORPUS / f"{name}.log"
    used_s, began_s = _children_s(), time.monotonic()
    command = [sys.executable, __file__, name, "--seconds", str(seconds), "--inside"]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    figures: list[tuple[str, ...]] = _FIGURES.findall(log.read_text(errors="replace"))
    first, last = (figures[0], figures[-1]) if figures else (("0", "?", "?", "0"),) * 2
    grown = int(last[3]) - int(first[3]) > MOST_GROWTH_MB
    fault = f"FAILED, see {log}" if status else "GREW" if grown else ""
    print(
        f"{name:<17}{last[0]:>10} inputs in {time.monotonic() - began_s:4.0f} s "
        f"({_children_s() - used_s:4.0f} s of processor time), coverage {first[1]} > {last[1]}, "
        f"features {first[2]} > {last[2]}, RSS {first[3]} > {last[3]} MB",
        fault,
        flush=True,
    )
    return not fault


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _escaped(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token)


@cache
def _leave_arrays_out(atheris: Any) -> None:
    """Compare numpy's arrays without the fuzzer: atheris 3.0.0 never frees what such a comparison returns.

    Call it while the fuzzer runs: `atheris.Fuzz` puts its own function in place.
    """
    compare = atheris._trace_cmp
    operators = [getattr(operator, each) for each in ("lt", "le", "eq", "ne", "gt", "ge")]  # as dis.cmp_op

    def compared(left: object, right: object, operation: int, *place: object) -> object:
        if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            return operators[operation](left, right)
        return compare(left, right, operation, *place)

    atheris._trace_cmp = compared


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from fuzz.targets import TARGETS, run
    logging.disable(logging.CRITICAL)  # warnings about inputs, thousands a second
    target = TARGETS[name]
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    FOUND.mkdir(exist_ok=True)
    words = CORPUS / f"{name}.dict"
    words.write_text("".join(f'"{_escaped(token)}"\n' for token in target.tokens))

    def check(data: bytes) -> None:
        _leave_arrays_out(atheris)
        run(target, data)

    options = [
        *([f"-dict={words}"] if target.tokens else []),
        f"-max_total_time={seconds}",
        f"-max_len={target.max_bytes}",
        f"-rss_limit_mb={MOST_RSS_MB}",
        "-timeout=20",
        f"-artifact_prefix={FOUND}/{name}-",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], check)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
