"""Cutting a stream into frames, however it arrives."""

from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.execution.frames import FrameProtocol
from torchere.serving.execution.wire import HEADER, MAX_FRAME_BYTES


class Transport:
    """Remembers that it was aborted."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(1, 64))
def test_frames_come_out_as_they_went_in(payloads: list[bytes], piece: int) -> None:
    seen: list[bytes] = []
    protocol = FrameProtocol(lambda view: seen.append(bytes(view)), lambda: None)
    stream = b"".join(HEADER.pack(len(payload)) + payload for payload in payloads)
    for start in range(0, len(stream), piece):
        protocol.data_received(stream[start : start + piece])
    assert seen == payloads


def test_a_length_over_the_limit_ends_the_connection() -> None:
    transport = Transport()
    protocol = FrameProtocol(lambda view: None, lambda: None)
    protocol.connection_made(transport)  # type: ignore[arg-type]
    protocol.data_received(HEADER.pack(MAX_FRAME_BYTES + 1) + b"x")
    assert transport.aborted
