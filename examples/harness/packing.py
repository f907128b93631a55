"""`torchere archive` as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from examples.harness.errors import ExampleFailed


def pack(store: Path, model: str, *flags: str | Path) -> Path:
    """Pack `{model}.mar` into the store; shows the flags and what came of it.

    Raises:
        ExampleFailed: the archiver refused; the text is its own.
    """
    shown = " ".join(flag.name if isinstance(flag, Path) else flag for flag in flags)
    print(f"packing  torchere archive --model-name {model} {shown}", flush=True)
    command = [str(Path(sys.executable).with_name("torchere")), "archive", "--model-name", model]
    command += [*map(str, flags), "--export-path", str(store), "--force"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExampleFailed(f"torchere archive ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    archive = store / f"{model}.mar"
    print(f"         {archive.name}, {archive.stat().st_size / 1e6:.1f} MB")
    return archive
