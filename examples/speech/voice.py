"""A voice made of numbers, so that the example knows when it speaks: vowels as sums of overtones.

A vowel is what the mouth's resonances (formants) leave of the overtones of the vocal folds (Fant 1960). The
resonances are the means for men of Peterson and Barney (1952).
"""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Sound = npt.NDArray[np.float64]  # one channel, -1 to 1

_FORMANTS_HZ = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}
_BANDWIDTHS_HZ = (80, 90, 120)
_VOWEL_S, _CONSONANT_S = 0.18, 0.05


def said(vowels: str, pitch_hz: float, rate_hz: int, chance: np.random.Generator) -> Sound:
    """Syllables of a whispered consonant and a vowel."""
    parts = [
        part for vowel in vowels for part in (_consonant(rate_hz, chance), _vowel(vowel, pitch_hz, rate_hz))
    ]
    return np.concatenate(parts)


def recording(
    turns: Sequence[tuple[float, str, float]], rate_hz: int, seed: int = 0
) -> tuple[Sound, list[tuple[float, float]]]:
    """Each turn is (seconds of silence, vowels said, pitch in Hz); a second of silence ends it.

    Returns:
        The sound, with a little noise all over, and from when to when there is speech, in seconds.
    """
    chance = np.random.default_rng(seed)
    parts: list[Sound] = []
    spoken, now_s = [], 0.0
    for silence_s, vowels, pitch_hz in turns:
        phrase = said(vowels, pitch_hz, rate_hz, chance)
        parts += [np.zeros(int(silence_s * rate_hz)), phrase]
        spoken.append((now_s + silence_s, now_s + silence_s + len(phrase) / rate_hz))
        now_s = spoken[-1][1]
    sound = np.concatenate([*parts, np.zeros(rate_hz)])
    return sound + 0.002 * chance.standard_normal(len(sound)), spoken


def as_wav(sound: Sound, rate_hz: int) -> bytes:
    """A WAV file of 16-bit integers."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def _consonant(rate_hz: int, chance: np.random.Generator) -> Sound:
    count = int(_CONSONANT_S * rate_hz)
    hiss: Sound = 0.02 * chance.standard_normal(count) * np.hanning(count)
    return hiss


def _vowel(vowel: str, pitch_hz: float, rate_hz: int) -> Sound:
    time_s = np.arange(int(_VOWEL_S * rate_hz)) / rate_hz
    falling_hz = pitch_hz * (1.1 - 0.2 * time_s / _VOWEL_S)
    phase = 2 * np.pi * np.cumsum(falling_hz) / rate_hz
    overtones = np.arange(1.0, int(0.45 * rate_hz / pitch_hz / 1.1))
    waves = np.sin(overtones[:, None] * phase) * _loudness(vowel, overtones * pitch_hz)[:, None]
    swell = np.minimum(1, np.minimum(time_s / 0.04, (_VOWEL_S - time_s) / 0.06))
    sound: Sound = waves.sum(0) * swell
    sound *= 0.5 / np.abs(sound).max()
    return sound


def _loudness(vowel: str, frequencies_hz: npt.NDArray[Any]) -> Sound:
    """What the resonances leave of each overtone; the folds' own sound falls with the frequency."""
    left: Sound = 1 / frequencies_hz
    for formant_hz, width_hz in zip(_FORMANTS_HZ[vowel], _BANDWIDTHS_HZ, strict=True):
        ratio = frequencies_hz / formant_hz
        left = left / np.hypot(1 - ratio**2, ratio * width_hz / formant_hz)
    return left
