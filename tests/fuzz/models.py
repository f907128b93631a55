"""Fuzz targets for weights of models, and for the sounds, arrays and pictures of requests."""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.exported_program import check_program
from torchere.archiver.scan.pickles import UNKNOWN, foreign_names_in, imported_names, is_plain
from torchere.archiver.scan.torchscript import check_script
from torchere.archiver.scan.weights import AOTINDUCTOR, EXPORTED_PROGRAM, classify
from torchere.archiver.signature import Signature, SignatureError, parse
from torchere.handlers.audio.wav import decode_wav
from torchere.handlers.errors import PredictionException
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.npy import read_npy, write_npy
from torchere.handlers.vision.decode import ImageLimits, decode_image

LIMITS = ImageLimits(max_pixels=10_000, max_decoded_bytes=2**20)
PROGRAMS = (EXPORTED_PROGRAM, AOTINDUCTOR)  # code of their own, or a zip that can't be read, is foreign
FILLED_FIRST = b"\x96"  # BYTEARRAY8: Python fills its whole length before it reads the first byte


class Stub:
    """Stands for everything that a pickle imports, and may be called with anything."""

    def __new__(cls, *_: Any, **__: Any) -> Stub:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes any arguments."""

    def __call__(self, *_: Any, **__: Any) -> Stub:
        return self


class Recorder(pickle._Unpickler):
    """Python's own unpickler, which notes what it would import, and imports nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: list[str] = []

    def find_class(self, module: str, name: str) -> type[Stub]:
        self.names.append(f"{module}.{name}")
        return Stub

    def persistent_load(self, pid: object) -> None:
        """Accepts every id."""


def pickles(data: bytes) -> None:
    """What a pickle imports is found without unpickling it, or counts as unknown."""
    found = imported_names(data)
    foreign_names_in(io.BytesIO(data), len(data))
    if FILLED_FIRST in data or UNKNOWN in found:
        return
    recorder = Recorder(data)
    with suppress(Exception):  # modules that were imported before an error count
        recorder.load()
    missed = [name for name in recorder.names if name not in found]
    assert not missed, f"the scan does not see {missed}"
    assert any(not is_plain(name) for name in found) or all(map(is_plain, recorder.names))


def pickle_seeds() -> list[bytes]:
    """Objects in every protocol, with memos and imports of each kind."""
    values = (OrderedDict(a=[1, 2.5, b"x"], b=("t",) * 2), [PurePosixPath("/x"), {1, 2}, bytearray(b"y")])
    seeds = [pickle.dumps(value, protocol) for value in values for protocol in range(6)]
    return [
        *seeds,
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93h\x00h\x01\x93.",
    ]


def weights(data: bytes) -> None:
    """A file of weights is classified, whatever it is; its checks raise their own errors only."""
    found = classify("w.pt", io.BytesIO(data))
    assert found.pickled or not found.foreign or found.kind in PROGRAMS
    for check in (check_script, check_program):
        try:
            check(io.BytesIO(data), len(data))
        except UnsafeModel:
            continue


def weights_seeds() -> list[bytes]:
    """Zips as torch writes them, safetensors, and the beginnings of other kinds."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    pickled = pickle.dumps(OrderedDict(w=1), 2)
    script = {
        "constants.pkl": pickled,
        "data.pkl": pickled,
        "code/__torch__.py": b"def forward(self): return x\n",
    }
    program = {
        "archive_format": b"pt2",
        "models/model.json": b"{}",
        "data/weights/model_weights_config.json": b"{}",
    }
    return [
        *(
            _zip(f"m/{name}", files)
            for name, files in (("", script), ("", program), ("", {"data.pkl": pickled}))
        ),
        struct.pack("<Q", len(header)) + header + bytes(4),
        pickled,
        b"\x08\x07\x12\x01x",
        b"\x7fELF",
    ]


def _zip(folder: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(folder + name), content)
    return buffer.getvalue()


def signature(data: bytes) -> None:
    """A signature, or SignatureError."""
    try:
        assert isinstance(parse(data.decode("utf-8", "replace")), Signature)
    except SignatureError:
        return


def signature_seeds() -> list[bytes]:
    """A signature with two inputs."""
    tensors = [
        {"name": "x", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "y", "datatype": "BYTES", "shape": [1]},
    ]
    return [json.dumps({"version": 1, "inputs": tensors, "outputs": tensors[:1]}).encode()]


def sounds(data: bytes) -> None:
    """A sound of at most its length, or a 400."""
    try:
        sound = decode_wav(data, 1.0)
    except PredictionException as err:
        assert err.error_code == 400
        return
    assert np.isfinite(sound.samples).all()
    assert len(sound.samples) <= len(data)


def sound_seeds() -> list[bytes]:
    """16 bits and floats, in one and two channels."""
    found = []
    for kind, channels, bits in ((1, 1, 16), (3, 2, 32)):
        form = struct.pack(
            "<HHIIHH", kind, channels, 8000, 8000 * channels * bits // 8, channels * bits // 8, bits
        )
        body = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", 16) + bytes(16)
        found.append(b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body)
    return found


def arrays(data: bytes) -> None:
    """An array of numbers, or TensorError; written again, it is read as the same."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, about headers of Python 2
            array = read_npy(data, "body")
    except TensorError:
        return
    assert array.nbytes <= len(data)
    again = read_npy(write_npy(array), "body")
    assert (again.dtype.newbyteorder("="), again.shape) == (array.dtype.newbyteorder("="), array.shape)
    assert np.ascontiguousarray(again).tobytes() == np.ascontiguousarray(array).tobytes()


def array_seeds() -> list[bytes]:
    """Arrays in both orders, and one of objects."""
    arrays = (
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.asfortranarray(np.ones((2, 2), ">i8")),
        np.zeros(0, "?"),
    )
    found = []
    for array in (*arrays, np.array([None])):
        buffer = io.BytesIO()
        np.save(buffer, array)
        found.append(buffer.getvalue())
    return found


def pictures(data: bytes) -> None:
    """A picture within its limits, or a 400."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            picture = decode_image(data, LIMITS)
        except PredictionException as err:
            assert err.error_code == 400
            return
    assert picture.size[0] * picture.size[1] <= 10_000


def picture_seeds() -> list[bytes]:
    """A picture in each of the common formats."""
    found = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        buffer = io.BytesIO()
        Image.new("RGB", (6, 5), (200, 10, 30)).save(buffer, kind)
        found.append(buffer.getvalue())
    return found
