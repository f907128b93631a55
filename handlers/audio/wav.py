"""Decodes WAV files to samples, without resampling.

The file is RIFF (Microsoft, "Multimedia Data Standards Update", 1994): chunks of a name, a length and that
many bytes. Python's own `wave` reads no float samples, and no files with an unknown length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from torchere.handlers.errors import bad_request

RATES_HZ = (8000, 16000)
MAX_CHANNELS = 8
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_LENGTHS = (0, 0xFFFFFFFF)  # programs that write to a pipe know the length only at the end
_SAMPLES: dict[tuple[int, int], tuple[str, float]] = {  # (kind, bits): NumPy dtype, full-scale value
    (_PCM, 16): ("<i2", 32768.0),
    (_FLOAT, 32): ("<f4", 1.0),
}


@dataclass(frozen=True, slots=True)
class Sound:
    """A decoded sound; `samples` is float32 [samples], one channel, from -1 to 1."""

    samples: npt.NDArray[np.float32]
    rate_hz: int

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return len(self.samples) / self.rate_hz


class _Format(NamedTuple):
    dtype: str
    largest: float
    channels: int
    rate_hz: int


def decode_wav(data: bytes | bytearray, max_seconds: float) -> Sound:
    """Decode a WAV file of 16-bit integers or 32-bit floats, 8 or 16 kHz; channels are averaged.

    Raises:
        PredictionException: 400, the file is unsupported, broken, truncated, or longer than `max_seconds`.
    """
    sound_format: _Format | None = None
    for name, start, length in _chunks(data):
        if name == b"fmt ":
            sound_format = _format(data[start : start + length])
        elif name == b"data":
            if sound_format is None:
                _refuse("the WAV file has samples before their format", "a 'fmt ' chunk first")
            return _sound(data, start, length, sound_format, max_seconds)
    _refuse("the WAV file has no samples", "a 'data' chunk; it may be cut off")


def _chunks(data: bytes | bytearray) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start of the content, length) of each chunk; a length may exceed the data."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        head = bytes(data[:12])
        _refuse(
            f"the request is not a WAV file: {len(data)} bytes that begin with {head!r}",
            "the bytes of a WAV file (curl -T speech.wav URL)",
        )
    start = 12
    while start + 8 <= len(data):
        length = int.from_bytes(data[start + 4 : start + 8], "little")
        yield bytes(data[start : start + 4]), start + 8, length
        start += 8 + length + length % 2  # chunks begin at even offsets


def _format(chunk: bytes | bytearray) -> _Format:
    if len(chunk) < 16:
        _refuse(f"the WAV file's 'fmt ' chunk has {len(chunk)} bytes", "at least 16")
    kind, channels, rate_hz, _, _, bits = struct.unpack("<HHIIHH", chunk[:16])
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = int.from_bytes(chunk[24:26], "little")  # a GUID, which begins with the format number
    if (kind, bits) not in _SAMPLES:
        _refuse(f"the WAV file has {bits} bits of kind {kind}", "16-bit PCM (kind 1) or 32-bit float (3)")
    if rate_hz not in RATES_HZ:
        wanted = " or ".join(map(str, RATES_HZ))
        _refuse(f"the WAV file has {rate_hz} samples a second", f"{wanted}: ffmpeg -i FILE -ar 16000 OUT.wav")
    if not 1 <= channels <= MAX_CHANNELS:
        _refuse(f"the WAV file has {channels} channels", f"1 to {MAX_CHANNELS}")
    return _Format(*_SAMPLES[kind, bits], channels, rate_hz)


def _sound(
    data: bytes | bytearray, start: int, length: int, sound_format: _Format, max_seconds: float
) -> Sound:
    there = len(data) - start
    if length in _UNKNOWN_LENGTHS:
        length = there
    if length > there:
        _refuse(f"the WAV file is cut off: {there} of {length} bytes of sound", "the whole file")
    dtype, largest, channels, rate_hz = sound_format
    frames = length // (np.dtype(dtype).itemsize * channels)
    if frames > max_seconds * rate_hz:
        _refuse(
            f"the sound is {frames / rate_hz:.1f} s long", f"at most {max_seconds:g} s; send it in pieces"
        )
    stored: Any = np.frombuffer(data, dtype, frames * channels, start)
    samples = (stored.astype(np.float32) / np.float32(largest)).reshape(frames, channels).mean(axis=1)
    if not np.isfinite(samples).all():
        _refuse("the sound has samples that are no finite numbers", "-1.0 to 1.0")
    return Sound(samples, rate_hz)


def _refuse(found: str, expected: str) -> NoReturn:
    raise bad_request(f"{found[0].upper()}{found[1:]}; expected {expected}")
