"""The built-in handler for voice activity detection: finds the segments of a sound that have speech."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchere.handlers.audio.wav import RATES_HZ, Sound, decode_wav
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.loading.devices import to_device, without_gradients
from torchere.handlers.loading.torchscript import load_torchscript
from torchere.handlers.metrics import timed
from torchere.handlers.rows import (
    came_as_tensors,
    config_of,
    fields_of,
    first_row,
    read_each,
    refusal,
    request_of,
    settings_of,
)

# Find speech segments from the probability of speech over time. Pure; no clock, no model.
#
# A segment begins where the probability reaches `threshold`. It ends where the probability falls below
# `threshold - release`, if at least `min_silence_ms` later it is below that limit again, and has not reached
# `threshold` in between. So neither a quiet syllable nor a breath ends a segment.


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """The rules for a segment; the defaults are the values that Silero published with its models.

    Raises:
        ValueError: a value is out of its range, or the padding could make two segments meet.
    """

    threshold: float = 0.5  # 0 to 1
    release: float = 0.15  # hysteresis
    min_speech_ms: float = 250.0  # a segment is longer than this
    min_silence_ms: float = 100.0
    pad_ms: float = 30.0  # added to a segment on both sides; at most half of min_silence_ms

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
    """Finds the speech segments of one recording from its probabilities as they arrive. Not thread-safe.

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
        self._now = 0  # the sample at which the next probability begins
        self._start: int | None = None  # first sample of the open segment
        self._quiet: int | None = None  # first sample of the silence that may end the open segment

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


STREAM_TYPE = "application/x-ndjson"
_STEP = {16000: 512, 8000: 256}  # samples that the model takes at once, by sample rate in Hz
_DEFAULTS: dict[str, Any] = {
    "max_seconds": 600.0,  # of one sound
    **asdict(SegmentRules()),
}


class Heard(NamedTuple):
    """A batch between `preprocess` and `postprocess`; `sounds[i]` is the sound of request i, or its error."""

    sounds: list[Sound | PredictionException]
    segments: list[list[Segment]]  # of each request, found so far
    streamed: list[bool]  # whether each request gets its segments one by one


class VoiceActivity(BaseHandler):
    """Answers a WAV file with the segments that contain speech.

    The model is Silero VAD as TorchScript, or one with its interface: `model(chunk, rate)` takes float32
    [batch, 512] at 16 kHz or [batch, 256] at 8 kHz, returns probabilities [batch, 1], and keeps state until
    `model.reset_states()`. So every executor has its own copy of the model.

    Requests: the file as the body, or as the field `audio`, `data` or `body`. Answer: `{"segments":
    [{"start_s": 1.2, "end_s": 2.53}, ...], "duration_s": 6.0}`. A client that sends `Accept:
    application/x-ndjson`, or the field `stream` with `true`, gets each segment as it ends, as a line of
    JSON, and the duration as the last line. The Open Inference Protocol: input `audio` (BYTES [1]), outputs
    `start_s`, `end_s` (FP32 [segments]) and `duration_s`.

    `handler.voice_activity` in model-config.yaml: `max_seconds` of one file, and the members of
    `SegmentRules`.
    """

    names_classes = False

    def __init__(self) -> None:
        super().__init__()
        self.rules = SegmentRules()
        self.max_seconds = float(_DEFAULTS["max_seconds"])

    def initialize(self, context: Context) -> None:
        """Load the model and read `handler.voice_activity`.

        Raises:
            ValueError: a value under `handler.voice_activity` is wrong.
        """
        settings = settings_of(config_of(context), "voice_activity", _DEFAULTS)
        self.max_seconds = settings.pop("max_seconds")
        try:
            self.rules = SegmentRules(**settings)
        except ValueError as err:
            raise ValueError(f"handler.voice_activity in model-config.yaml: {err}") from err
        super().initialize(context)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        model = load_torchscript(model_pt_path, self.device)  # not shared: a call changes its state
        if not hasattr(model, "reset_states"):
            expected = "expected Silero VAD as TorchScript"
            raise RuntimeError(f"{model_pt_path} has no method reset_states; {expected}")
        return model

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return a tenth of a second of silence at each sample rate."""
        return [{"body": bytearray(_silence(rate_hz))} for rate_hz in RATES_HZ]

    @timed
    def preprocess(self, data: Any) -> Any:
        """Decode the WAV file of each request."""
        sounds = read_each(data, self._sound)
        streamed = [self._is_streamed(index, row) for index, row in enumerate(data)]
        return Heard(sounds, [[] for _ in data], streamed)

    def _sound(self, row: Any) -> Sound:
        fields = row if isinstance(row, dict) else {"body": row}
        value = next((fields[name] for name in ("audio", "data", "body") if name in fields), None)
        if isinstance(value, np.ndarray) and value.dtype == object and value.size == 1:
            value = value.item()
        if not isinstance(value, (bytes, bytearray)):
            raise bad_request(
                f"The request has no sound: found {fields_of(fields)}; expected 'audio', 'data' or 'body': "
                "the bytes of a WAV file (curl -T speech.wav URL)"
            )
        return decode_wav(value, self.max_seconds)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on all sounds of one rate together; stream segments for requests that ask for it."""
        for rate_hz in RATES_HZ:
            group = [
                (place, sound)
                for place, sound in enumerate(data.sounds)
                if isinstance(sound, Sound) and sound.rate_hz == rate_hz
            ]
            for index, segment in self._segments([sound for _, sound in group], rate_hz):
                place = group[index][0]
                data.segments[place].append(segment)
                if data.streamed[place]:
                    self._send(place, _line(_as_json(segment, rate_hz)))
        return data

    def _segments(self, sounds: list[Sound], rate_hz: int) -> Iterator[tuple[int, Segment]]:
        """Yield (index of the sound, segment) as soon as a segment is complete."""
        if not sounds:
            return
        step = _STEP[rate_hz]
        lengths = [len(sound.samples) for sound in sounds]
        segmenters = [Segmenter(self.rules, rate_hz, step, length) for length in lengths]
        self.model.reset_states()
        for start in range(0, max(lengths), step):
            probabilities = self._probabilities(sounds, start, step, rate_hz)
            for place, length in enumerate(lengths):
                if start >= length:
                    continue
                segment = segmenters[place].feed(probabilities[place])
                if segment is not None:
                    yield place, segment
                if start + step >= length and (segment := segmenters[place].finish()) is not None:
                    yield place, segment

    def _probabilities(self, sounds: list[Sound], start: int, step: int, rate_hz: int) -> list[float]:
        chunk = torch.zeros(len(sounds), step)  # a shorter sound is padded with silence
        for row, sound in zip(chunk, sounds, strict=True):
            part = sound.samples[start : start + step]
            row[: len(part)] = torch.from_numpy(part)
        with without_gradients(self.device):
            probabilities: list[float] = self.model(to_device(chunk, self.device), rate_hz)[:, 0].tolist()
        return probabilities

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the segments of each request, or the last line of a stream."""
        return [
            refusal(self.context, place, sound)
            if isinstance(sound, PredictionException)
            else self._answer(place, sound, segments, is_streamed)
            for place, (sound, segments, is_streamed) in enumerate(zip(*data, strict=True))
        ]

    def _answer(self, place: int, sound: Sound, segments: list[Segment], is_streamed: bool) -> object:
        duration_s = round(sound.duration_s, 3)
        if came_as_tensors(self.context, place):
            bounds = np.array([(one.start, one.end) for one in segments], np.float32).reshape(-1, 2)
            starts_s, ends_s = (bounds / sound.rate_hz).T
            return {"start_s": starts_s, "end_s": ends_s, "duration_s": np.array([duration_s], np.float32)}
        if is_streamed:
            self.context.set_response_content_type(first_row.get() + place, STREAM_TYPE)
            return _line({"duration_s": duration_s})
        return {"segments": [_as_json(one, sound.rate_hz) for one in segments], "duration_s": duration_s}

    def _send(self, place: int, text: str) -> None:
        index = first_row.get() + place
        self.context.set_response_content_type(index, STREAM_TYPE)
        self.context.send_partial(index, self.context.encode_part(index, text))

    def _is_streamed(self, place: int, row: Any) -> bool:
        index = request_of(self.context, place)
        if index is None or came_as_tensors(self.context, place):
            return False
        value = row.get("stream") if isinstance(row, dict) else None
        if value in (b"true", "true", True):
            return True
        headers = self.context.get_all_request_header(index)
        return any(name.lower() == "accept" and STREAM_TYPE in str(value) for name, value in headers.items())


def _as_json(segment: Segment, rate_hz: int) -> dict[str, float]:
    return {"start_s": round(segment.start / rate_hz, 3), "end_s": round(segment.end / rate_hz, 3)}


def _line(value: object) -> str:
    return f"{json.dumps(value)}\n"


def _silence(rate_hz: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(bytes(2 * rate_hz // 10))
    return buffer.getvalue()
