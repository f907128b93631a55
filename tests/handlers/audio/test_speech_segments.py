from __future__ import annotations

import importlib.util
import random

import pytest

from torchere.handlers.audio.voice_activity import Segment, Segmenter, SegmentRules

RATE_HZ, STEP = 1000, 10  # a probability each 10 ms


def segments(probabilities: list[float], rules: SegmentRules | None = None) -> list[tuple[int, int]]:
    total = STEP * len(probabilities)
    segmenter = Segmenter(rules or SegmentRules(), RATE_HZ, STEP, total)
    found = [*map(segmenter.feed, probabilities), segmenter.finish()]
    return [(one.start, one.end) for one in found if one is not None]


def test_speech_between_silences_is_a_segment_with_padding() -> None:
    assert segments([0.0] * 20 + [0.9] * 30 + [0.0] * 20) == [(170, 530)]


def test_a_segment_is_known_as_soon_as_the_silence_after_it_is_long_enough() -> None:
    segmenter = Segmenter(SegmentRules(), RATE_HZ, STEP, 10_000)
    for probability in [0.9] * 30 + [0.0] * 10:
        assert segmenter.feed(probability) is None
    assert segmenter.feed(0.0) == Segment(0, 330)


def test_speech_that_is_too_short_is_none() -> None:
    assert segments([0.0] * 20 + [0.9] * 25 + [0.0] * 20) == []
    assert segments([0.0] * 20 + [0.9] * 26 + [0.0] * 20) == [(170, 490)]


def test_a_short_silence_does_not_end_a_segment() -> None:
    assert segments([0.9] * 20 + [0.0] * 9 + [0.9] * 20 + [0.0] * 20) == [(0, 520)]
    assert segments([0.9] * 30 + [0.0] * 12 + [0.9] * 30 + [0.0] * 20) == [(0, 330), (390, 750)]


def test_what_is_only_a_little_quieter_does_not_end_a_segment() -> None:
    assert segments([0.9] * 20 + [0.4] * 50 + [0.0] * 20) == [(0, 730)]
    assert segments([0.4] * 50) == []


def test_a_sound_that_ends_in_speech_ends_the_segment() -> None:
    assert segments([0.0] * 20 + [0.9] * 40) == [(170, 600)]


def test_silence_and_nothing_have_no_segments() -> None:
    assert segments([0.0] * 50) == []
    assert segments([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 1.0}, "0 < threshold < 1"),
        ({"threshold": 0.1}, "release < threshold"),
        ({"min_speech_ms": -1.0}, "none below 0"),
        ({"pad_ms": 60.0}, "at most half of min_silence_ms"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentRules(**change)


@pytest.mark.skipif(
    importlib.util.find_spec("silero_vad") is None,
    reason="silero-vad is not installed: pip install -e '.[demo]'",
)
@pytest.mark.parametrize("seed", range(20))
def test_sileros_own_code_cuts_the_same_segments(seed: int) -> None:
    import silero_vad

    chance = random.Random(seed)
    probabilities = [0.5]
    for _ in range(400):
        probabilities.append(min(1.0, max(0.0, probabilities[-1] + chance.gauss(0, 0.2))))
    wanted = silero_vad.get_speech_timestamps_from_probs(
        probabilities, audio_length_samples=512 * 401, sampling_rate=16000
    )
    segmenter = Segmenter(SegmentRules(), 16000, 512, 512 * 401)
    found = [*map(segmenter.feed, probabilities), segmenter.finish()]
    assert [{"start": one.start, "end": one.end} for one in found if one] == wanted
    assert wanted
