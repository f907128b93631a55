from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.audio.wav import Sound, decode_wav
from torchere.handlers.errors import PredictionException


def pcm(samples: list[int], rate_hz: int = 16000, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return buffer.getvalue()


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
        for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def wav_format(kind: int, bits: int, channels: int = 1, rate_hz: int = 8000, more: bytes = b"") -> bytes:
    size = bits // 8 * channels
    return struct.pack("<HHIIHH", kind, channels, rate_hz, rate_hz * size, size, bits) + more


def refused(data: bytes, max_seconds: float = 10.0) -> str:
    with pytest.raises(PredictionException) as caught:
        decode_wav(data, max_seconds)
    assert caught.value.error_code == 400
    return caught.value.message


def test_integers_become_floats_from_minus_one_to_one() -> None:
    sound = decode_wav(pcm([0, 16384, -32768]), 10.0)
    assert sound.samples.tolist() == [0.0, 0.5, -1.0]
    assert sound.samples.dtype == np.float32
    assert (sound.rate_hz, sound.duration_s) == (16000, 3 / 16000)


def test_floats_are_taken_as_they_are() -> None:
    values = np.array([0.25, -0.5], "<f4").tobytes()
    data = riff((b"fmt ", wav_format(3, 32)), (b"fact", b"\0\0\0\0"), (b"data", values))
    assert decode_wav(bytearray(data), 10.0).samples.tolist() == [0.25, -0.5]


def test_the_extensible_form_names_its_kind_further_behind() -> None:
    more = struct.pack("<HHI", 22, 16, 4) + struct.pack("<H", 1) + bytes(14)
    data = riff((b"fmt ", wav_format(0xFFFE, 16, more=more)), (b"data", struct.pack("<h", 16384)))
    assert decode_wav(data, 10.0).samples.tolist() == [0.5]


def test_channels_become_their_mean() -> None:
    assert decode_wav(pcm([16384, 0, -16384, 16384], channels=2), 10.0).samples.tolist() == [0.25, 0.0]


def test_other_chunks_of_odd_length_are_passed_over() -> None:
    data = riff((b"LIST", b"odd"), (b"fmt ", wav_format(1, 16)), (b"data", b"\0\x40"))
    assert decode_wav(data, 10.0).samples.tolist() == [0.5]


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF])
def test_a_file_from_a_pipe_does_not_know_its_length(length: int) -> None:
    data = riff((b"fmt ", wav_format(1, 16)), (b"data", b"\0\x40\0\x20"))
    assert decode_wav(data[:-8] + struct.pack("<I", length) + data[-4:], 10.0).samples.tolist() == [0.5, 0.25]


def test_what_is_no_sound_that_can_be_used_is_refused_with_what_was_found() -> None:
    assert "not a WAV file: 4 bytes" in refused(b"ID3\x04")
    assert "44100 samples a second; expected 8000 or 16000" in refused(pcm([0], rate_hz=44100))
    assert "8 bits of kind 1" in refused(riff((b"fmt ", wav_format(1, 8)), (b"data", b"")))
    assert "9 channels; expected 1 to 8" in refused(pcm([0] * 9, channels=9))
    assert "samples before their format" in refused(riff((b"data", b"\0\0")))
    assert "has no samples" in refused(riff((b"fmt ", wav_format(1, 16))))
    assert "'fmt ' chunk has 4 bytes" in refused(riff((b"fmt ", b"\1\0\1\0")))
    assert "cut off: 2 of 4 bytes" in refused(pcm([1, 2])[:-2])
    nan = np.array([np.nan], "<f4").tobytes()
    assert "no finite numbers" in refused(riff((b"fmt ", wav_format(3, 32)), (b"data", nan)))


def test_a_sound_that_is_too_long_is_refused_before_it_is_decoded() -> None:
    assert "2.0 s long; expected at most 1 s" in refused(pcm([0] * 16000, rate_hz=8000), 1.0)


@given(st.binary(max_size=64), st.integers(0, 60))
def test_bytes_of_any_kind_are_a_sound_or_refused(tail: bytes, cut: int) -> None:
    data = pcm([1, 2, 3, 4])[:cut] + tail
    try:
        sound = decode_wav(data, 1.0)
    except PredictionException as err:
        assert err.error_code == 400
    else:
        assert isinstance(sound, Sound)
