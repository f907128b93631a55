"""Find speech segments from the probability of speech over time. Pure; no clock, no model.

A segment begins where the probability reaches `threshold`. It ends where the probability falls below
`threshold - release`, if it is below that again `min_silence_ms` later without having reached `threshold` in
between; so neither a quiet syllable nor a breath ends it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """The rules for a segment; the defaults are the values published with Silero's models.

    Raises:
        ValueError: a value is out of its range, or the padding could make two segments meet.
    """

    threshold: float = 0.5  # 0 to 1
    release: float = 0.15  # hysteresis
    min_speech_ms: float = 250.0  # a segment is longer than this
    min_silence_ms: float = 100.0
    pad_ms: float = 30.0  # added on both sides; at most half of min_silence_ms

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1 or not 0 <= self.release < self.threshold:
            raise ValueError(
                f"threshold {self.threshold} and release {self.release}; expected 0 < threshold < 1 and "
                "0 <= release < threshold"
            )
        if self.min_speech_ms < 0 or not 0 <= 2 * self.pad_ms <= self.min_silence_ms:
            raise ValueError(
                f"min_speech_ms {self.min_speech_ms}, pad_ms {self.pad_ms}, min_silence_ms "
                f"{self.min_silence_ms}; expected none below 0, and pad_ms at most half of min_silence_ms"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """Speech from sample `start` up to, but not including, sample `end`."""

    start: int
    end: int


class Segmenter:
    """Finds the segments of one recording while its probabilities arrive. Not thread-safe.

    Args:
        rules: the rules for a segment.
        rate_hz: samples per second.
        step: samples per probability.
        total: samples of the whole recording; padding ends there.
    """

    def __init__(self, rules: SegmentRules, rate_hz: int, step: int, total: int) -> None:
        self._rules = rules
        self._step = step
        self._total = total
        self._min_speech = rules.min_speech_ms * rate_hz / 1000
        self._min_silence = rules.min_silence_ms * rate_hz / 1000
        self._pad = int(rules.pad_ms * rate_hz / 1000)
        self._now = 0  # where the next probability begins
        self._start: int | None = None  # of the open segment
        self._quiet: int | None = None  # start of the silence that may end it

    def feed(self, probability: float) -> Segment | None:
        """Take the next probability; return the segment that it ends, or None."""
        now, self._now = self._now, self._now + self._step
        if probability >= self._rules.threshold:
            self._quiet = None
            self._start = now if self._start is None else self._start
            return None
        if self._start is None or probability >= self._rules.threshold - self._rules.release:
            return None
        self._quiet = now if self._quiet is None else self._quiet
        return self._close(self._quiet) if now - self._quiet >= self._min_silence else None

    def finish(self) -> Segment | None:
        """End the recording; return the segment that was open, or None."""
        return self._close(self._total)

    def _close(self, end: int) -> Segment | None:
        start, self._start, self._quiet = self._start, None, None
        if start is None or end - start <= self._min_speech:
            return None
        return Segment(max(0, start - self._pad), min(self._total, end + self._pad))
