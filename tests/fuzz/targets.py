"""The table of fuzz targets, and the bounds that hold for each input of each target.

A target is a function of bytes. It lets only documented errors happen, and asserts what must be true of every
input: a second reader agrees, what is written is read again, nothing is left behind. `run` adds the bounds of
time and memory. `make fuzz` feeds the targets with `run.py`, and `test_found.py` with mutations, without
atheris.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

from fuzz import bodies, connections, files, models

MOST_S = 1.0  # of processor time for one input
MOST_BYTES = 64 * 2**20  # that one input may add to the process's peak


class TooMuch(Exception):
    """An input took more time or memory than any may."""


class Target(NamedTuple):
    """One target: what it checks, inputs to begin with, and the longest input."""

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    max_bytes: int = 4096
    tokens: tuple[bytes, ...] = ()  # that mutations insert


JSON = tuple(b'[ ] { } : , " null true false 1e5 -0 1E400 NaN -Infinity \\ud800 \\u00e9 "" [[ ]]'.split())
HEADS = (
    *(
        b"\r\n",
        b"\r\n\r\n",
        b": ",
        b" ",
        b"\t",
        b"\n",
        b"\r",
        b"\0",
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"GET",
        b"CONNECT",
    ),
    *(b"Content-Length: ", b"Transfer-Encoding: chunked", b"Host: x", b"Expect: 100-continue", b"0\r\n\r\n"),
    *(
        b"Connection: ",
        b"close",
        b"keep-alive",
        b"identity",
        b", ",
        b"gzip",
        b"http://",
        b"%00",
        b"/predictions/echo",
    ),
)
YAML = tuple(
    b"- : ? | > & * << !! !!binary !!set !!omap !!python/object: %TAG --- ... { } [ ] ~ 1:30 .inf".split()
)
TENSORS = (
    *JSON,
    *(
        b'"inputs":',
        b'"outputs":',
        b'"name":',
        b'"shape":',
        b'"datatype":',
        b'"data":',
        b'"parameters":',
        b'"id":',
    ),
    *(
        b'"binary_data_size":',
        b'"classification":',
        b'"binary_data":',
        b'"sequence_id":',
        b'"timeout":',
        b"9" * 20,
    ),
    *(b'"BYTES"', b'"BOOL"', b'"FP16"', b'"BF16"', b'"INT8"', b'"UINT64"', b'"shared_memory_region":'),
)
FORMS = (
    b"&",
    b"=",
    b"+",
    b"%",
    b"%41",
    b"%zz",
    b"\r\n",
    b"--",
    b"; ",
    b'"',
    b"\\",
    b"name=",
    b"name*=utf-8''",
)


TARGETS = {
    "zip": Target(files.zip_archive, files.zip_seeds),
    "tar": Target(files.tar_archive, files.tar_seeds, 12_288),
    "manifest": Target(files.manifest, files.manifest_seeds, 4096, JSON),
    "model_config": Target(files.model_config, files.model_config_seeds, 2048, YAML),
    "workflow": Target(files.workflow, files.workflow_seeds, 2048, YAML),
    "properties": Target(files.properties, files.properties_seeds),
    "tensors": Target(bodies.tensors, bodies.tensors_seeds, 4096, TENSORS),
    "generate": Target(bodies.generate, bodies.generate_seeds, 4096, JSON),
    "tensor_answer": Target(bodies.tensor_answer, bodies.tensor_answer_seeds, 4096, TENSORS),
    "json": Target(bodies.plain_json, bodies.json_seeds, 4096, JSON),
    "form": Target(bodies.form, bodies.form_seeds, 4096, FORMS),
    "multipart": Target(bodies.multipart, bodies.multipart_seeds, 4096, FORMS),
    "content_coding": Target(bodies.content_coding, bodies.coding_seeds),
    "pickles": Target(models.pickles, models.pickle_seeds),
    "weights": Target(models.weights, models.weights_seeds),
    "signature": Target(models.signature, models.signature_seeds, 4096, TENSORS),
    "sounds": Target(models.sounds, models.sound_seeds),
    "arrays": Target(models.arrays, models.array_seeds),
    "pictures": Target(models.pictures, models.picture_seeds),
    "http1": Target(connections.http1, connections.http1_seeds, 4096, HEADS),
    "http1_head": Target(connections.http1_head, connections.head_seeds, 20_000, HEADS),
    "http1_chunks": Target(connections.http1_chunks, connections.chunk_seeds, 4096, HEADS),
    "http2": Target(connections.http2, connections.http2_seeds),
    "header_blocks": Target(connections.header_blocks, connections.header_seeds),
    "grpc_messages": Target(connections.grpc_messages, connections.message_seeds),
    "frames_to_server": Target(connections.frames_to_server, connections.report_seeds, 60_000),
    "frames_to_worker": Target(connections.frames_to_worker, connections.run_seeds, 60_000),
}


def run(target: Target, data: bytes) -> None:
    """Check one input within the bounds.

    Raises:
        TooMuch: it took too much time or memory; or any error of the target's, which is a finding, too.
    """
    peak, began_s = _peak_bytes(), time.thread_time()
    target.check(data)
    took_s, grown = time.thread_time() - began_s, _peak_bytes() - peak
    if took_s > MOST_S:
        gc.collect()  # a full collection of a large heap is not the input's
        began_s = time.thread_time()
        target.check(data)
        took_s = time.thread_time() - began_s
    if took_s > MOST_S:
        raise TooMuch(f"{took_s:.1f} s for {len(data)} bytes")
    if grown > MOST_BYTES:
        raise TooMuch(f"{grown / 2**20:.0f} MiB for {len(data)} bytes")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
