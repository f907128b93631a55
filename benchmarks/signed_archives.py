"""What the signature of an archive costs: opening and unpacking it with and without `require_signed`.

    python benchmarks/signed_archives.py [--rounds 5] [--size-mb 400]

Packs one archive with weights of random bytes, signs it, and opens and unpacks it in turns by a store that
requires signatures and by one that does not, in a thread, as a registration does. Printed are medians and
ranges of: signing, hashing alone (the verification of a file that is not copied), opening, unpacking, and the
longest that an event loop beside them waited for a turn. The archive is in the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchere.archiver.reader import open_archive
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.config.server_settings import Limits
from torchere.serving.store.package import Store
from torchere.serving.store.signing import SignWith, TrustedKeys, sign

TICK_S = 0.001


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of signed archives.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = _measured(Path(folder), options.rounds, options.size_mb)
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:<36}{middle * 1e3:8.1f} ms  ({min(values) * 1e3:.1f}-{max(values) * 1e3:.1f})")


def _measured(folder: Path, rounds: int, size_mb: int) -> dict[str, list[float]]:
    archive = _packed(folder, size_mb)
    keys = folder / "signing.pem", folder / "signing.pub"
    _run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(keys[0]))
    _run("openssl", "ec", "-in", str(keys[0]), "-pubout", "-out", str(keys[1]))
    trust = TrustedKeys([keys[1]])
    signature = sign(open_archive(archive), SignWith(key=keys[0])).read_bytes()
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, call in (
            ("sign", lambda: sign(open_archive(archive), SignWith(key=keys[0]))),
            ("verify in place", lambda: trust.verify(archive, signature, set(), folder / "scratch")),
        ):
            begun = time.perf_counter()
            call()
            found.setdefault(name, []).append(time.perf_counter() - begun)
        for name, given in (("unsigned", None), ("signed", trust)):
            store = Store(archive.parent, Limits(), folder, trust=given)
            for what, seconds in asyncio.run(_registered(store, archive.name)).items():
                found.setdefault(f"{name}: {what}", []).append(seconds)
            store.close()
    return found


async def _registered(store: Store, name: str) -> dict[str, float]:
    """Open and unpack in a thread; return the times, and how late a timer of the loop was at most."""
    lags: list[float] = []
    watching = asyncio.create_task(_watch(lags))
    begun = time.perf_counter()
    opened = await asyncio.to_thread(store.open, name)
    middle = time.perf_counter()
    await asyncio.to_thread(store.unpack, name, opened)
    end = time.perf_counter()
    watching.cancel()
    await asyncio.to_thread(opened.close)
    return {"open": middle - begun, "unpack": end - middle, "longest wait of the loop": max(lags)}


async def _watch(lags: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - begun - TICK_S)


def _packed(folder: Path, size_mb: int) -> Path:
    (folder / "store").mkdir()
    weights = folder / "weights.pt"
    with weights.open("wb") as file:
        for _ in range(size_mb):
            file.write(os.urandom(1_000_000))
    (folder / "h.py").write_text("def handle(data, context): return data\n")
    request = ArchiveRequest(
        model_name="m",
        version="1.0",
        handler=str(folder / "h.py"),
        serialized_file=str(weights),
        export_path=str(folder / "store"),
    )
    return write_archive(request)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)  # as the server
    main()
