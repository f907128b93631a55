"""The progress bar."""

from __future__ import annotations

import io

from torchere.archiver.writer import LARGE_BYTES, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, total_bytes: int) -> str:
    now_s = iter(range(100))
    progress = Progress(stream, clock=lambda: float(next(now_s)))
    progress.start("model.pt", total_bytes)
    progress.advance(total_bytes // 2)
    progress.advance(total_bytes // 2)
    progress.finish()
    return stream.getvalue()


def test_a_large_file_is_shown_on_a_terminal_and_taken_away_again() -> None:
    shown = run(Terminal(), LARGE_BYTES)
    assert "\rmodel.pt [###############               ]  50%" in shown
    assert "100%" in shown
    assert shown.endswith("\r\x1b[K")


def test_a_small_file_is_not_shown() -> None:
    assert run(Terminal(), LARGE_BYTES - 2) == ""


def test_nothing_is_written_where_nobody_looks() -> None:
    assert run(io.StringIO(), LARGE_BYTES) == ""


def test_it_is_not_drawn_more_often_than_one_can_see() -> None:
    terminal = Terminal()
    progress = Progress(terminal, clock=lambda: 1.0)
    progress.start("model.pt", LARGE_BYTES)
    for _ in range(50):
        progress.advance(1)
    assert terminal.getvalue().count("model.pt") == 1
