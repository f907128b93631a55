"""Hostile bodies sent to the readers of the built-in handlers: code in them never runs.

`docs/bad-inputs.md` names these tests.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from torchere.handlers.audio.wav import decode_wav
from torchere.handlers.encode import decode_input
from torchere.handlers.envelopes import json_body
from torchere.handlers.errors import PredictionException
from torchere.handlers.rows import value_of
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.npy import read_npy
from torchere.handlers.text import _text_of, basic_english_tokens, expand_contractions, ngrams_iterator
from torchere.handlers.vision.decode import ImageLimits, decode_image


class Exploit:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def payloads(folder: Path) -> dict[str, bytes]:
    """The exploit as a pickle of every protocol, in torch's formats and in numpy's."""
    exploit = Exploit(folder)
    found = {f"protocol {number}": pickle.dumps(exploit, number) for number in range(6)}
    for name, new in (("torch.save", True), ("torch.save before 1.6", False)):
        buffer = io.BytesIO()
        torch.save(exploit, buffer, _use_new_zipfile_serialization=new)
        found[name] = buffer.getvalue()
    array = np.empty(1, object)
    array[0] = exploit
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return found | {"npy": buffer.getvalue()}


READERS: dict[str, Callable[[bytes], Any]] = {
    "a picture": decode_image,
    "a picture of any size": lambda body: decode_image(body, ImageLimits(max_pixels=0)),
    "a text": lambda body: _text_of({"body": bytearray(body)}),
    "a sound": lambda body: decode_wav(body, 10.0),
    "an array": lambda body: read_npy(body, "body"),
    "an envelope": lambda body: json_body({"body": body}),
    "bytes": lambda body: decode_input(body, ""),
    "JSON": lambda body: decode_input(body, "application/json"),
    "a plain text": lambda body: decode_input(body, "text/plain"),
    "a pickle by its type": lambda body: decode_input(body, "application/vnd.bentoml+pickle"),
    "a pickle by another type": lambda body: decode_input(body, "application/octet-stream"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_in_a_request_is_never_run(tmp_path: Path, reader: str) -> None:
    folder = tmp_path / "pwned"
    for body in payloads(folder).values():
        try:
            READERS[reader](body)
        except (PredictionException, TensorError):
            continue
    assert not folder.exists()


def test_the_exploit_would_work(tmp_path: Path) -> None:
    pickle.loads(payloads(tmp_path / "pwned")["protocol 2"])
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content_type",
    [
        *("application/vnd.bentoml+pickle", "application/x-pickle", "application/python-pickle"),
        *("application/x-python-serialize", "application/x-torch", "application/zip", "application/x-yaml"),
        *("APPLICATION/JSON", "application/json ", "application/jsonp", "image/jpeg", "no type", "\udc80"),
    ],
)
def test_a_content_type_that_means_nothing_here_does_nothing(content_type: str) -> None:
    body = b'{"a": 1}'
    assert decode_input(body, content_type) == bytearray(body)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_a_picture_that_says_it_is_text_is_bytes(content_type: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "JPEG")
    assert decode_input(buffer.getvalue(), content_type) == bytearray(buffer.getvalue())


def test_of_fields_that_collide_data_counts_and_others_are_passed_over() -> None:
    many = {f"data{number}": b"x" for number in range(1000)}
    assert value_of({"body": b"b", "data": b"d", **many}) == b"d"
    assert value_of({"body": b"b", **many}) == b"b"
    assert value_of(many) is None


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1:1/x"/><script>1</script></svg>'
XML_BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><svg>&b;</svg>'


@pytest.mark.parametrize("body", [SVG, b"<?xml version='1.0'?>" + SVG, XML_BOMB, b"%PDF-1.7\n"])
def test_documents_that_may_fetch_or_run_something_are_no_pictures(body: bytes) -> None:
    with pytest.raises(PredictionException) as caught:
        decode_image(body)
    assert caught.value.error_code == 400


def test_a_picture_that_is_an_archive_too_is_a_picture() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(buffer, "PNG")
    with zipfile.ZipFile(buffer, "a") as archive:  # behind the picture
        archive.writestr("data.pkl", pickle.dumps(1))
    assert decode_image(buffer.getvalue()).size == (3, 2)


def test_of_a_picture_of_many_frames_the_first_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.new("P", (8, 8), number % 2) for number in range(1000)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    loaded: list[int] = []
    seek = GifImageFile._seek

    def seek_and_note(file: GifImageFile, frame: int, update_image: bool = True) -> None:
        loaded.append(frame)
        seek(file, frame, update_image)

    monkeypatch.setattr(GifImageFile, "_seek", seek_and_note)
    assert decode_image(buffer.getvalue()).size == (8, 8)
    assert set(loaded) <= {0, 1}


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
def test_pictures_of_every_mode_come_out_in_a_mode_that_handlers_know(mode: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (4, 3)).save(buffer, "TIFF")
    assert decode_image(buffer.getvalue()).convert("RGB").size == (4, 3)


@pytest.mark.parametrize(
    "text",
    [
        "\u0301" * 50_000,
        "a\0b\0",
        "\u202eevil\u202c \u200f",
        "\ufeff\ufffe",
        "'" * 50_000,
        "a" * 200_000,
        " ." * 50_000,
        "<" * 20_000,
        "&amp;" * 20_000,
    ],
    ids=["marks", "NUL", "right to left", "BOM", "quotes", "one word", "stops", "brackets", "entities"],
)
def test_odd_texts_are_cut_into_words(text: str) -> None:
    words = basic_english_tokens(expand_contractions(_text_of({"data": text})))
    assert sum(1 for _ in ngrams_iterator(words, 2)) <= 2 * len(text)


@pytest.mark.parametrize("body", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_are_refused(body: bytes) -> None:
    with pytest.raises(PredictionException, match="not UTF-8") as caught:
        _text_of({"body": body})
    assert caught.value.error_code == 400
