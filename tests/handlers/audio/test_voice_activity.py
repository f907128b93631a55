from __future__ import annotations

import base64
import importlib.resources
import importlib.util
import io
import json
import random
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.audio.voice_activity import Segment, Segmenter, SegmentRules, VoiceActivity
from torchere.handlers.context import RequestProcessor
from torchere.handlers.envelopes import JSONEnvelope
from torchere.handlers.micro_batching import MicroBatching
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.tensors.answer import OPEN_INFERENCE

Answer = Callable[..., Any]
needs_silero = pytest.mark.skipif(
    importlib.util.find_spec("silero_vad") is None,
    reason="silero-vad is not installed: pip install -e '.[demo]'",
)


class Loudness(torch.nn.Module):
    """Is called like Silero's model; what is loud is speech. Counts the chunks since the last reset."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = 0

    @torch.jit.export
    def reset_states(self) -> None:
        self.heard = 0

    def forward(self, chunk: torch.Tensor, rate_hz: int) -> torch.Tensor:
        assert chunk.shape[1] == (512 if rate_hz == 16000 else 256)
        self.heard += 1
        return (chunk.abs().amax(1, keepdim=True) > 0.1).float()


def wav(*parts: tuple[float, float], rate_hz: int = 16000) -> bytearray:
    """A sound of (seconds, loudness) one after the other."""
    rng = np.random.default_rng(0)
    sound = np.concatenate([loud * rng.uniform(-1, 1, int(s * rate_hz)) for s, loud in parts])
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return bytearray(buffer.getvalue())


TWICE = ((0.512, 0.0), (0.512, 0.5), (0.512, 0.0), (1.024, 0.5), (0.512, 0.0))
SEGMENTS = [{"start_s": 0.482, "end_s": 1.054}, {"start_s": 1.506, "end_s": 2.59}]


@pytest.fixture
def make(tmp_path: Path, make_context: Any) -> Callable[..., Answer]:
    def maker(model: bytes | None = None, **settings: Any) -> Answer:
        if model is None:
            torch.jit.save(torch.jit.script(Loudness().eval()), str(tmp_path / "vad.pt"))
        else:
            (tmp_path / "vad.pt").write_bytes(model)
        config = {"handler": {"voice_activity": settings}}
        context = make_context(tmp_path, model={"serializedFile": "vad.pt"}, config=config)
        entry_point = load_entry_point("voice_activity", context)

        def answer(*rows: Any, headers: dict[str, str] | None = None, parts: Any = None) -> Any:
            requests = [RequestProcessor(headers or {}, f"r{index}") for index in range(len(rows))]
            sink = [] if parts is None else parts
            context.begin_batch(requests, lambda index, chunk: sink.append((index, chunk)))
            return entry_point(list(rows), context)

        answer.entry_point = entry_point  # type: ignore[attr-defined]
        answer.context = context  # type: ignore[attr-defined]
        return answer

    return maker


def test_the_segments_of_a_file_are_answered_in_seconds(make: Any) -> None:
    answer = make()
    assert answer({"body": wav(*TWICE)}) == [{"segments": SEGMENTS, "duration_s": 3.072}]
    assert answer({"audio": wav((0.5, 0.0))}) == [{"segments": [], "duration_s": 0.5}]


@pytest.mark.parametrize("rate_hz", [8000, 16000])
def test_sounds_of_a_batch_are_heard_side_by_side_whatever_their_length_and_rate(
    make: Any, rate_hz: int
) -> None:
    answer = make()
    other = wav((0.256, 0.9), (0.256, 0.0), rate_hz=24000 - rate_hz)
    rows = [wav(*TWICE, rate_hz=rate_hz), other, wav((0.512, 0.5), rate_hz=rate_hz)]
    first, second, third = answer(*({"body": row} for row in rows))
    assert first["segments"] == SEGMENTS
    assert second["segments"] == [{"start_s": 0.0, "end_s": 0.286}]
    assert third == {"segments": [{"start_s": 0.0, "end_s": 0.512}], "duration_s": 0.512}


def test_a_request_that_is_wrong_does_not_touch_its_batch_mates(make: Any) -> None:
    answer = make()
    bad, good, none = answer({"body": bytearray(b"mp3")}, {"body": wav(*TWICE)}, {"text": "hello"})
    assert (bad["code"], bad["type"]) == (400, "BadRequestException")
    assert "not a WAV file" in bad["message"]
    assert "no sound: found the fields 'text'" in none["message"]
    assert good["segments"] == SEGMENTS
    statuses = [answer.context.get_response_status(index)[0] for index in range(3)]
    assert statuses == [400, 200, 400]


@pytest.mark.parametrize(
    ("headers", "field"),
    [({"Accept": "application/x-ndjson"}, {}), ({}, {"stream": b"true"}), ({}, {"stream": "true"})],
)
def test_segments_are_streamed_one_by_one_when_asked_for(
    make: Any, headers: dict[str, str], field: dict[str, Any]
) -> None:
    parts: list[tuple[int, bytes]] = []
    answer = make()
    (last,) = answer({"body": wav(*TWICE), **field}, headers=headers, parts=parts)
    assert [(index, json.loads(chunk)) for index, chunk in parts] == [(0, one) for one in SEGMENTS]
    assert all(chunk.endswith(b"\n") for _, chunk in parts)
    assert json.loads(last) == {"duration_s": 3.072}
    assert answer.context.get_response_content_type(0) == "application/x-ndjson"


def test_the_open_inference_protocol_gets_arrays(make: Any) -> None:
    audio = np.array([bytes(wav(*TWICE))], dtype=object)
    (found,) = make()({"audio": audio}, headers={OPEN_INFERENCE: "{}", "accept": "application/x-ndjson"})
    assert found["start_s"].dtype == np.float32
    assert found["start_s"].tolist() == pytest.approx([one["start_s"] for one in SEGMENTS])
    assert found["end_s"].tolist() == pytest.approx([one["end_s"] for one in SEGMENTS])
    assert found["duration_s"].tolist() == pytest.approx([3.072])


def test_sounds_of_one_request_are_answered_together(make: Any) -> None:
    answer = make()
    sound = base64.b64encode(wav((0.512, 0.5))).decode()
    rows = [{"body": {"instances": [{"audio": {"b64": sound}, "stream": True}] * 2}}]
    answer.context.begin_batch([RequestProcessor({"accept": "application/x-ndjson"}, "")], None)
    (found,) = JSONEnvelope(answer.entry_point).handle(rows, answer.context)
    segments = [{"start_s": 0.0, "end_s": 0.512}]
    assert json.loads(found) == {"predictions": [{"segments": segments, "duration_s": 0.512}] * 2}


def test_segments_of_a_part_reach_the_client_that_asked_for_them(make: Any) -> None:
    answer = make()
    batching = MicroBatching(answer.entry_point.instance, 1)
    parts: list[tuple[int, bytes]] = []
    requests = [RequestProcessor(one, "") for one in ({}, {"Accept": "application/x-ndjson"})]
    answer.context.begin_batch(requests, lambda index, chunk: parts.append((index, chunk)))
    first, last = batching([{"body": wav(*TWICE)}] * 2, answer.context)
    batching.shutdown()
    assert first["segments"] == SEGMENTS
    assert json.loads(last) == {"duration_s": 3.072}
    assert [index for index, _ in parts] == [1, 1]
    assert [one.response_headers for one in requests] == [{}, {"content-type": "application/x-ndjson"}]


def test_every_executor_has_a_model_of_its_own_because_it_remembers(make: Any) -> None:
    one, other = make(), make()
    one({"body": wav((1.0, 0.0))})
    assert one.entry_point.instance.model.heard == 32
    assert other.entry_point.instance.model.heard == 0


def test_the_rules_come_from_the_configuration(make: Any) -> None:
    answer = make(min_speech_ms=600.0, pad_ms=0, max_seconds=4)
    (found,) = answer({"body": wav(*TWICE)})
    assert found["segments"] == [{"start_s": 1.536, "end_s": 2.56}]
    (refused,) = answer({"body": wav((4.5, 0.0))})
    assert "at most 4 s" in refused["message"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"treshold": 0.4}, "voice_activity.treshold in model-config.yaml is unknown"),
        ({"threshold": "high"}, "is 'high'; expected a number"),
        ({"threshold": 2}, "0 < threshold < 1"),
    ],
)
def test_a_wrong_configuration_does_not_load(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_context_of_a_users_test_without_a_model_config_has_the_defaults(make: Any, tmp_path: Path) -> None:
    make()
    handler = VoiceActivity()
    manifest = {"model": {"serializedFile": "vad.pt"}}
    context: Any = SimpleNamespace(system_properties={"model_dir": str(tmp_path)}, manifest=manifest)
    handler.initialize(context)
    assert handler.rules == SegmentRules()


def test_another_model_than_silero_is_said_when_it_is_loaded(make: Any, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), str(tmp_path / "other.pt"))
    with pytest.raises(RuntimeError, match=r"vad\.pt has no method reset_states; expected Silero VAD"):
        make((tmp_path / "other.pt").read_bytes())


def test_the_warm_up_is_answered(make: Any) -> None:
    answer = make()
    rows = answer.entry_point.warmup_data()
    assert answer(*rows) == [{"segments": [], "duration_s": 0.1}] * 2


@needs_silero
def test_silero_finds_what_its_own_code_finds_alone_and_in_a_batch(make: Any) -> None:
    import silero_vad

    file = importlib.resources.files("silero_vad").joinpath("data/silero_vad.jit")
    noise = wav((0.7, 0.0), (1.0, 0.3), (0.5, 0.001))
    time_s = torch.arange(35200) / 16000
    hum = sum(torch.sin(2 * torch.pi * 130 * k * time_s) / k for k in range(1, 20))
    hum = 0.2 * hum * ((time_s * 3).int() % 2) + torch.frombuffer(noise[44:], dtype=torch.int16) / 32768
    samples = (hum.clamp(-1, 1) * 32767).to(torch.int16)
    body = noise[:44] + bytearray(samples.numpy().tobytes())
    rules = {"threshold": 0.3, "min_speech_ms": 100.0}
    answer = make(file.read_bytes(), **rules)
    wanted = silero_vad.get_speech_timestamps(
        samples.float() / 32768, silero_vad.load_silero_vad(), threshold=0.3, min_speech_duration_ms=100
    )
    seconds = [{"start_s": one["start"] / 16000, "end_s": one["end"] / 16000} for one in wanted]
    (alone,) = answer({"body": body})
    _, together = answer({"body": wav((3.0, 0.4))}, {"body": body})
    assert seconds
    assert alone == together == {"segments": seconds, "duration_s": 2.2}


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
