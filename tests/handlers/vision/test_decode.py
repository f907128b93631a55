from __future__ import annotations

import base64
import gzip
import io
import pickle
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.vision.decode import ImageLimits, decode_image, picture_of_tensor


def _refusal(data: bytes | str, limits: ImageLimits | None = None) -> str:
    with pytest.raises(PredictionException) as caught:
        decode_image(data, limits)
    assert caught.value.error_code == 400
    return caught.value.message


def _png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_pictures_of_common_formats_are_decoded(photo: Image.Image, kind: str) -> None:
    buffer = io.BytesIO()
    photo.save(buffer, kind)
    assert decode_image(buffer.getvalue()).size == photo.size


def test_base64_text_is_decoded_with_and_without_its_prefix(jpeg: bytes, photo: Image.Image) -> None:
    text = base64.b64encode(jpeg).decode()
    for spelling in (text, f"data:image/jpeg;base64,{text}", text[:40] + "\n" + text[40:]):
        assert decode_image(spelling).size == photo.size


def test_exif_rotation_is_not_applied(photo: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).size == photo.size


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "found no bytes"),
        (b'{"data": [1]}', "look like JSON"),
        (b"hello there", "begin with b'hello there'"),
        (pickle.dumps([1], protocol=2), "zip or pickle"),
        (b"PK\x03\x04rest", "zip or pickle"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "10 bytes of a JPEG whose head is broken or cut off"),
        (b"\x89PNG\r\n\x1a\n\0\0", "10 bytes of a PNG whose head is broken or cut off"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "24 bytes of a HEIC file, which Pillow does not decode"),
        (b"/9j/4AAQSkZJRg==", "or as base64 with Content-Type: text/plain"),
    ],
)
def test_what_is_no_picture_is_described_with_the_way_to_send_one(body: bytes, found: str) -> None:
    message = _refusal(body)
    assert found in message
    assert "curl -T" in message


def test_text_that_is_not_base64_is_refused() -> None:
    assert "is text that is not base64" in _refusal("hello there!")


def test_postscript_never_reaches_an_interpreter() -> None:
    message = _refusal(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nquit\n")
    assert "not an image" in message


def test_a_truncated_picture_is_refused(jpeg: bytes) -> None:
    assert "is broken" in _refusal(jpeg[: len(jpeg) // 2])


@pytest.mark.skipif("AVIF" not in Image.registered_extensions().values(), reason="this Pillow has no AVIF")
def test_an_avif_that_lost_its_pixels_is_refused() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 40), (9, 200, 30)).save(buffer, "AVIF")
    assert "not an image" in _refusal(buffer.getvalue().replace(b"iloc", b"free"))  # says where they are


def test_a_picture_packed_in_a_way_that_pillow_does_not_know_is_refused(photo: Image.Image) -> None:
    buffer = io.BytesIO()
    photo.convert("P").save(buffer, "BLP")
    unknown = buffer.getvalue()[:4] + struct.pack("<i", 9) + buffer.getvalue()[8:]
    assert "is broken" in _refusal(unknown)


@pytest.mark.filterwarnings("ignore:IM image format:DeprecationWarning")
def test_a_picture_of_a_mode_that_pillow_does_not_know_is_refused() -> None:
    head = b"Image type: RVB image\r\nImage size (x*y): 4*4\r\nFile size (no of images): 1\r\n"
    assert "not an image" in _refusal(head.ljust(511, b"\0") + b"\x1a" + bytes(48))


def test_the_claimed_size_is_checked_before_decoding() -> None:
    message = _refusal(_png_claiming(2000, 1000), ImageLimits(max_pixels=1_000_000))
    assert "2000 x 1000 = 2000000 pixels, limit 1000000" in message


def test_a_decompression_bomb_is_refused() -> None:
    assert "too large" in _refusal(_png_claiming(60_000, 60_000))


def _fits(*cards: str) -> bytes:
    return b"".join(card.ljust(80).encode() for card in (*cards, "END")).ljust(2880)


def test_a_picture_whose_decoder_is_slow_for_any_bytes_has_a_lower_limit() -> None:
    named = (
        "XTENSION= 'BINTABLE'",
        "ZIMAGE  =                    T",
        "ZCMPTYPE= 'GZIP_1  '",
        "NAXIS   =                    0",
    )
    sizes = (
        "BITPIX  =                    8",
        "ZNAXIS  =                    2",
        "ZBITPIX =                    8",
    )
    table = _fits(*named, *sizes, "ZNAXIS1 =                 4096", "ZNAXIS2 =                 4096")
    body = (
        _fits("SIMPLE  =                    T", "NAXIS   =                    0")
        + table
        + gzip.compress(b"")
        + bytes(80)
    )
    assert "decoding 4096 x 4096 pixels of FITS" in _refusal(body)


def _dds(width: int, height: int) -> bytes:
    """A DDS of one byte for each pixel, with a mask for each of four channels."""
    sizes = struct.pack("<4I", 124, 0, height, width).ljust(72, b"\0")
    return b"DDS " + (sizes + struct.pack("<8I", 32, 0x41, 0, 8, 3, 12, 48, 192)).ljust(124, b"\0")


def test_a_dds_has_a_limit_of_pixels_because_its_decoder_is_slow() -> None:
    assert decode_image(_dds(2, 1) + b"\xff\0").tobytes() == b"\xff" * 4 + b"\0" * 4
    assert "decoding 1025 x 1024 pixels of DDS" in _refusal(_dds(1025, 1024))


def test_an_xpm_of_one_pixel_is_not_read_to_its_end() -> None:
    rows = b'static char *x[] = {\n"1 1 1 1",\n"a c #010203",\n/* pixels */\n"' + b"a" * 1000 + b'"\n};\n'
    assert "not an image" in _refusal(b"/* XPM */\n" + rows)


# 34 bytes: the header of a lossless WebP of 16383 x 5000 pixels.
TINY_WEBP = b"RIFF\x1a\0\0\0WEBPVP8L\x0e\0\0\0/" + struct.pack("<I", 16382 | 4999 << 14) + bytes(9)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_short_file_of_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(TINY_WEBP) == 34
    monkeypatch.setattr(Image.Image, "load", None)
    assert "16383 x 5000 pixels of WEBP (RGB) takes 1310640000 bytes, limit 536870912" in _refusal(TINY_WEBP)
    assert "limit 536870912" in _refusal(_png_claiming(13_000, 13_000))


@pytest.mark.parametrize(
    ("kind", "mode", "pixel_bytes"),
    [
        *(("PNG", "RGB", 4), ("PNG", "L", 4), ("GIF", "P", 4), ("JPEG", "RGB", 10), ("JPEG", "L", 6)),
        *(("WEBP", "RGB", 16), ("JPEG2000", "RGB", 19)),
    ],
)
def test_the_memory_of_a_picture_is_that_of_its_mode_and_decoder(
    kind: str, mode: str, pixel_bytes: int
) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (10, 10)).save(buffer, kind)
    decode_image(buffer.getvalue(), ImageLimits(max_decoded_bytes=100 * pixel_bytes))
    assert f"takes {100 * pixel_bytes} bytes" in _refusal(
        buffer.getvalue(), ImageLimits(max_decoded_bytes=100 * pixel_bytes - 1)
    )


def _icons(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    png = buffer.getvalue()
    entry = b"ic07" + struct.pack(">I", len(png) + 8) + png  # an icon of 128 x 128
    return b"icns" + struct.pack(">I", len(entry) + 8) + entry


def test_a_picture_inside_another_has_the_limit_of_memory_too() -> None:
    limits = ImageLimits(max_decoded_bytes=24 * 128 * 128)
    assert decode_image(_icons(Image.new("RGBA", (128, 128))), limits).size == (128, 128)
    assert "it holds one of 16512 pixels, limit 16384" in _refusal(
        _icons(Image.new("RGBA", (129, 128))), limits
    )


def test_postscript_inside_another_picture_never_reaches_an_interpreter() -> None:
    def field(kind: int, data: bytes) -> bytes:
        return bytes([0x1C, 3, kind]) + struct.pack(">H", len(data)) + data

    size = struct.pack(">H", 10)
    head = field(60, b"\1\0") + field(20, size) + field(30, size) + field(120, b"\5")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nquit\n"
    assert "not an image" in _refusal(head + bytes([0x1C, 8, 10]) + struct.pack(">H", len(eps)) + eps)


def test_a_picture_larger_than_what_its_header_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)
    assert "160000 pixels" in _refusal(_icons(Image.new("RGBA", (400, 400))))


def test_too_many_bytes_are_refused(jpeg: bytes) -> None:
    assert "more than the limit of 1000" in _refusal(jpeg, ImageLimits(max_bytes=1000))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_no_damage_to_a_file_escapes_as_another_error(jpeg: bytes, photo: Image.Image) -> None:
    chance = random.Random(7)
    files = [jpeg]
    for kind in ("PNG", "GIF", "TIFF", "WEBP"):
        buffer = io.BytesIO()
        photo.resize((32, 32)).save(buffer, kind)
        files.append(buffer.getvalue())
    outcomes = {"decoded": 0, "refused": 0}
    for number in range(200):
        damaged = bytearray(files[number % len(files)])
        for _ in range(chance.randint(1, 30)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            decode_image(damaged, ImageLimits(max_pixels=10_000_000))
            outcomes["decoded"] += 1
        except PredictionException:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20
    assert sum(outcomes.values()) == 200


LIMITS = ImageLimits()


def pixels_of(image: Any) -> Any:
    assert isinstance(image, Image.Image)
    return np.asarray(image)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_bytes_of_pixels_are_a_picture(channels: int) -> None:
    sent = np.arange(4 * 5 * channels, dtype=np.uint8).reshape(4, 5, channels)
    expected = sent[:, :, 0] if channels == 1 else sent
    for tensor in (sent, sent[None], np.asfortranarray(sent)):
        assert np.array_equal(pixels_of(picture_of_tensor(tensor, LIMITS)), expected)


def test_two_dimensions_are_a_grey_picture() -> None:
    sent = np.arange(20, dtype=np.uint8).reshape(4, 5)
    assert np.array_equal(pixels_of(picture_of_tensor(sent, LIMITS)), sent)


def test_an_image_file_may_come_as_it_is_or_in_base64(jpeg: bytes) -> None:
    as_file = picture_of_tensor(np.array([jpeg], object), LIMITS)
    as_text = picture_of_tensor(np.array([[base64.b64encode(jpeg)]], object), LIMITS)
    assert np.array_equal(pixels_of(as_file), pixels_of(as_text))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_numbers_with_a_fraction_are_the_models_input(dtype: str) -> None:
    sent = np.linspace(-1, 1, 24, dtype=dtype).reshape(2, 3, 4)
    for tensor in (sent, sent[None]):
        found = picture_of_tensor(tensor, LIMITS)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), sent.astype("f4"))


def test_bfloat16_is_the_models_input_too() -> None:
    found = picture_of_tensor(torch.ones(1, 3, 2, 2, dtype=torch.bfloat16), LIMITS)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (3, 2, 2))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros((3, 4, 5), np.uint8), r"UINT8 of shape \[3, 4, 5\]; expected UINT8 \[height, width, 3\]"),
        (np.zeros((0, 4, 3), np.uint8), r"UINT8 of shape \[0, 4, 3\]"),
        (np.zeros((2, 4, 5, 3), np.uint8), r"of 2 images of shape .* Send a request for each image"),
        (np.zeros(4, np.float32), r"shape \[4\]"),
        (np.zeros((4, 5, 3), np.int64), "a tensor of int64 that is no image"),
        (np.zeros((4, 5), bool), "a tensor of bool that is no image"),
        (np.array([b"a", b"b"], object), "2 elements of BYTES"),
        (np.array([b"\xffnonsense"], object), "not an image"),
        (np.array([b""], object), "found no bytes"),
    ],
)
def test_what_is_no_picture_is_refused(tensor: Any, message: str) -> None:
    with pytest.raises(PredictionException, match=message) as caught:
        picture_of_tensor(tensor, LIMITS)
    assert caught.value.error_code == 400


def test_the_limit_of_pixels_holds_for_tensors() -> None:
    with pytest.raises(PredictionException, match="5 x 4 = 20 pixels, limit 19"):
        picture_of_tensor(np.zeros((4, 5, 3), np.uint8), ImageLimits(max_pixels=19))
