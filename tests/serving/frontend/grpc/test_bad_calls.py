"""Calls that are hostile or broken in ways that the tests of gRPC's parts do not try.

`docs/bad-inputs.md` names these tests.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.frontend.grpc.service import dispatcher
from torchere.serving.frontend.http2.header_blocks import request_head
from torchere.serving.telemetry.metrics import Metrics

PATH = "/test.Service/echo"
HEAD = [(":method", "POST"), (":path", PATH), ("content-type", "application/grpc")]


def answered(keys, *metadata):
    """How a call with this metadata is ended; None: it is opened."""
    ended = []
    head, _ = request_head([*HEAD, *metadata])
    stream: Any = SimpleNamespace(head=head, client=("10.0.0.7", 4321), caller="", subjects=())
    stream.refuse = lambda *how, **_: ended.append(how)
    opened: Any = None
    dispatcher({PATH: lambda stream: opened}, keys, "inference", Metrics())(stream)
    return ended[0] if ended else None


def test_of_two_keys_none_counts(planes):
    good, bad = ("authorization", "Bearer inference"), ("authorization", "Bearer wrong")
    assert answered(planes.keys, good, bad)[0] == 7
    assert answered(planes.keys, bad, good)[0] == 7
    assert answered(planes.keys, good, good) is None


@pytest.mark.parametrize(
    "metadata",
    [
        ("authorization-bin", "QmVhcmVyIGluZmVyZW5jZQ"),
        ("Authorization", "Bearer inference"),  # names are in lower case in HTTP/2
        ("proxy-authorization", "Bearer inference"),
        ("cookie", "authorization=Bearer inference"),
    ],
)
def test_a_key_under_another_name_is_none(planes, metadata):
    assert answered(planes.keys, metadata)[0] == 7


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0n", 0), ("1n", 1e-9), ("0H", 0), ("99999999H", 99_999_999 * 3600), ("00000001S", 1)],
)
def test_the_shortest_and_the_longest_deadlines_are_deadlines(text, seconds):
    head, timeout_s = request_head([*HEAD, ("grpc-timeout", text)])
    assert (head.flaw, timeout_s) == ("", pytest.approx(seconds))


@pytest.mark.parametrize("text", ["-1S", "1", "S", "1s", "100000000S", "1.5S", "\u0661S", " 1S", "1S ", ""])
def test_what_is_no_deadline_ends_its_call(text):
    head, timeout_s = request_head([*HEAD, ("grpc-timeout", text)])
    assert timeout_s is None
    assert "grpc-timeout" in head.flaw
