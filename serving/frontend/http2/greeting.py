"""What this end says of itself when a client connects."""

from __future__ import annotations

from torchere.serving.frontend.http2.frame_reader import DATA_FRAME_BYTES
from torchere.serving.frontend.http2.frames import DEFAULT_WINDOW, Setting, settings_frame, window_update
from torchere.serving.frontend.http2.header_blocks import MAX_HEADER_LIST_BYTES
from torchere.serving.frontend.http2.inflow import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES

MAX_STREAMS = 1000  # at a time on one connection; a client with more calls has them wait at its end

GREETING = settings_frame(
    {
        Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        Setting.MAX_FRAME_SIZE: DATA_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
    }
) + window_update(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW)
