"""Floods of bodies that take much more to decode than to send: compressed JSON, forms, pictures."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from floods import CONTROL_S
from PIL import Image

SIZE = 6_500_000  # just within the default max_request_size
INLINE_SIZE = 65_000  # parsed on the event loop
SLACK_BYTES = 256 * 2**20  # beside the limits
HELD_BYTES = 128 * 2**20
DECODED_BYTES = 64 * 2**20  # of a picture
HANDLER = f"""
from torchere.handlers.errors import PredictionException
from torchere.handlers.vision.decode import ImageLimits, decode_image

LIMITS = ImageLimits(max_decoded_bytes={DECODED_BYTES})


class Handler:
    def initialize(self, context):
        self.reads_pictures = context.model_name == "pictures"

    def handle(self, data, context):
        if self.reads_pictures:
            return [str(decode_image(bytes(row["body"]), LIMITS).size) for row in data]
        return ["ok"] * len(data)
"""


@pytest.fixture(scope="module")
def server(start_server: Any, pack: Any) -> Any:
    """A server with a model of tensors, one of pictures, in batches, and one for the control requests."""
    models = {"control": 1, "tensors": 1, "pictures": 4}
    for model, batch_size in models.items():
        config = f"minWorkers: 1\nmaxWorkers: 1\nbatchSize: {batch_size}\nmaxBatchDelay: 50\n"
        files = {"h.py": HANDLER, "c.yaml": config}
        pack(model, files, handler="h.py", configFile="c.yaml")
    running = start_server(
        "--disable-token-auth",
        *("--models", *(f"{model}.mar" for model in models)),
        properties=f"max_held_bytes={HELD_BYTES}\n",
    )
    running.until_ready()
    return running


def message(path: str, content_type: str, body: bytes, coding: str = "identity") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\nContent-Encoding: {coding}\r\n"
    )
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def filled(begin: bytes, item: bytes, end: bytes, size: int = SIZE) -> bytes:
    return begin + b",".join([item] * ((size - len(begin) - len(end)) // (len(item) + 1))) + end


def picture(mode: str, size: tuple[int, int], kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind)
    return buffer.getvalue()


def parts(count: int) -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="a"' + b";a=b" * 1000 + b"\r\n\r\nx\r\n"
    return part * count + b"--b--\r\n"


JSON, FORM = "application/json", "application/x-www-form-urlencoded"
INFER = "/v2/models/tensors/versions/1.0/infer"  # with a version, the server parses the tensors
TENSOR = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":['
TINY_WEBP = b"RIFF\x1a\0\0\0WEBPVP8L\x0e\0\0\0/" + struct.pack("<I", 16382 | 4999 << 14) + bytes(9)
ATTACKS: dict[str, Callable[[], bytes]] = {
    "gzip of lists": lambda: message(INFER, JSON, gzip.compress(filled(TENSOR, b"[]", b"]}]}")), "gzip"),
    "gzip of lists in lists": lambda: message(
        INFER, JSON, gzip.compress(filled(TENSOR, b"[[1]]", b"]}]}")), "gzip"
    ),
    "gzip of lists in lists of the shape": lambda: message(
        INFER,
        JSON,
        gzip.compress(
            TENSOR.replace(b"[1,1]", b"[1000000,1,1]") + b",".join([b"[[1]]"] * 1_000_000) + b"]}]}"
        ),
        "gzip",
    ),
    "gzip of short lists": lambda: message(
        INFER, JSON, gzip.compress(filled(TENSOR, b"[]", b"]}]}", INLINE_SIZE)), "gzip"
    ),
    "gzip of lists in parameters": lambda: message(
        INFER, JSON, gzip.compress(filled(b'{"inputs":[],"parameters":{"a":[', b"[]", b"]}}")), "gzip"
    ),
    "gzip for no model": lambda: message(
        INFER.replace("tensors", "none"), JSON, gzip.compress(filled(TENSOR, b"1", b"]}]}")), "gzip"
    ),
    "many inputs": lambda: message(
        INFER,
        JSON,
        gzip.compress(filled(b'{"inputs":[', TENSOR[11:] + b"1]}", b"]}")),
        "gzip",
    ),
    "many members": lambda: message(
        "/v2/models/tensors/generate",
        JSON,
        gzip.compress(b"{" + b",".join([b'"%d":1' % number for number in range(SIZE // 11)]) + b"}"),
        "gzip",
    ),
    "percent signs": lambda: message("/predictions/control", FORM, b"a=" + b"%" * SIZE),
    "percent signs for no model": lambda: message("/predictions/none", FORM, b"a=" + b"%" * SIZE),
    "parameters of parts": lambda: message(
        "/predictions/control", "multipart/form-data; boundary=b", parts(1000)
    ),
    "a tiny WebP": lambda: message("/predictions/pictures", "image/webp", TINY_WEBP),
    "a large PNG": lambda: message("/predictions/pictures", "image/png", picture("L", (8000, 8000), "PNG")),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_answered_soon_and_memory_stays_bounded(server: Any, flood: Any, name: str) -> None:
    figures = flood(server, name, ATTACKS[name](), "/predictions/control")
    assert figures.quantile(0.99) < CONTROL_S
    assert figures.grown_bytes < HELD_BYTES + DECODED_BYTES + SLACK_BYTES
    assert sum(figures.answers.values())
    assert 500 not in figures.answers


def test_pictures_of_a_batch_with_a_large_one_are_answered(server: Any) -> None:
    good, bad = picture("RGB", (20, 10), "PNG"), TINY_WEBP
    with ThreadPoolExecutor(8) as pool:
        bodies = [bad if number % 4 == 1 else good for number in range(24)]
        replies = list(pool.map(lambda body: server.call("POST", "/predictions/pictures", body), bodies))
    assert {reply.status for reply, body in zip(replies, bodies, strict=True) if body is good} == {200}
    for reply, body in zip(replies, bodies, strict=True):
        if body is bad:
            assert reply.status == 400
            assert "takes 1310640000 bytes, limit 67108864" in reply.json()["message"]
