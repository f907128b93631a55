"""Packs Silero VAD as it is published, serves it, and asks when somebody speaks.

python -m examples.speech.demo
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.harness.errors import ExampleFailed, expect
from examples.harness.packing import pack
from examples.harness.run import main, served
from examples.harness.server import Server
from examples.speech.voice import Sound, as_wav, recording

MODEL = "silero_vad"
RATES_HZ = (16000, 8000)
TURNS = ((1.0, "aieoua", 120.0), (1.0, "oieaoei", 180.0))
_ROUNDED_S = 0.001  # what answers are rounded to
_NEAR_S = 0.3  # how far from the truth a beginning or an end may be: voices swell and fade
_CONFIG = """\
batchSize: 8
maxBatchDelay: 5
minWorkers: 2
maxWorkers: 2
"""

Segments = list[tuple[float, float]]


def run(work: Path) -> None:
    """Pack, serve, ask in four ways at both rates, compare."""
    package = _package()
    shutil.copyfile(
        package / "data" / "silero_vad.jit", work / "silero_vad.pt"
    )  # a suffix that tells what it is
    (work / "model-config.yaml").write_text(_CONFIG)
    flags = ("--serialized-file", work / "silero_vad.pt", "--config-file", work / "model-config.yaml")
    pack(work / "store", MODEL, *flags, "--handler", "voice_activity")
    with served(work, MODEL) as server:
        for rate_hz in RATES_HZ:
            sound, spoken = recording(TURNS, rate_hz)
            print(f"{rate_hz / 1000:g} kHz   a voice speaks   {_shown(spoken)}")
            plain = _plain(sound, rate_hz)
            _expect_near(plain, spoken, _NEAR_S, "the voice itself")
            for way, found in _answers(server, as_wav(sound, rate_hz)).items():
                print(f"         {way:<17}{_shown(found)}")
                _expect_near(found, plain, _ROUNDED_S, "Silero's own code")


def _package() -> Path:
    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        raise ExampleFailed("silero-vad is not there; pip install --no-deps silero-vad")
    return Path(found.origin).parent


def _plain(sound: Sound, rate_hz: int) -> Segments:
    """What the package's own code finds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        import silero_vad  # noqa: PLC0415  # may be missing: see `_package`

        model = silero_vad.load_silero_vad()
    samples = torch.from_numpy((np.clip(sound, -1, 1) * 32767).astype(np.int16)).float() / 32768
    found = silero_vad.get_speech_timestamps(samples, model, sampling_rate=rate_hz)
    return [(one["start"] / rate_hz, one["end"] / rate_hz) for one in found]


def _answers(server: Server, wav: bytes) -> dict[str, Segments]:
    with server.client() as client, server.grpc() as connection:
        whole = client.predict(MODEL, wav, content_type="audio/wav").json()
        lines = client.predict_stream(
            MODEL, wav, content_type="audio/wav", headers={"Accept": "application/x-ndjson"}
        )
        streamed = [json.loads(line) for line in b"".join(lines).splitlines()]
        over_grpc = connection.predict(MODEL, wav).json()
        tensors = client.infer(MODEL, {"audio": np.array([wav], dtype=object)})
    return {
        "REST": _segments(whole["segments"]),
        "REST, one by one": _segments(streamed[:-1]),
        "gRPC": _segments(over_grpc["segments"]),
        "OIP v2": list(zip(tensors["start_s"].tolist(), tensors["end_s"].tolist(), strict=True)),
    }


def _segments(found: list[dict[str, Any]]) -> Segments:
    return [(one["start_s"], one["end_s"]) for one in found]


def _expect_near(found: Segments, wanted: Segments, most_s: float, whose: str) -> None:
    same = len(found) == len(wanted)
    off_s = max(
        (abs(a - b) for pair in zip(found, wanted, strict=False) for a, b in zip(*pair, strict=True)),
        default=0,
    )
    expect(same and off_s <= most_s, f"found {_shown(found)}; {whose} has {_shown(wanted)}")


def _shown(segments: Segments) -> str:
    return ", ".join(f"{start_s:.2f} to {end_s:.2f} s" for start_s, end_s in segments) or "never"


if __name__ == "__main__":
    sys.exit(main("speech", run))
