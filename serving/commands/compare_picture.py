"""Draws a comparison report as an SVG bar chart, without a plot library."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

from torchere.archiver.models.verify.report import Report

_COLOURS = ("#1f77b4", "#ff7f0e")
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 640, 110, 16, 14, 64  # pixels
_FULL = _WIDTH - _LEFT - 110  # width of the longer bar of a pair
_SMALL = 'font-size="12"'


@dataclass(frozen=True, slots=True)
class _Pair:
    """One resource or latency of both models; shorter is better."""

    label: str
    values: tuple[float, float]
    shown: tuple[str, str]


def picture(report: Report) -> str:
    """Return the SVG text: paired bars of file, memory and latencies, and the similarity of outputs."""
    pairs = _pairs(report)
    height = _TOP + len(pairs) * (2 * _BAR + _GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(12, 22, "What each model takes (shorter is better)", 'font-size="15"'),
        *_legend(report),
    ]
    for index, pair in enumerate(pairs):
        parts += _bars(pair, _TOP + index * (2 * _BAR + _GAP))
    parts.append(_text(12, height - 14, _likeness(report)))
    return "\n".join([*parts, "</svg>", ""])


def _pairs(report: Report) -> list[_Pair]:
    one, other = report.original, report.packed
    sizes = (("file", one.size_bytes, other.size_bytes), ("memory", one.memory_bytes, other.memory_bytes))
    pairs = [
        _Pair(label, (first, second), (f"{first / 1e6:.1f} MB", f"{second / 1e6:.1f} MB"))
        for label, first, second in sizes
        if first is not None and second is not None
    ]
    for batch in sorted(one.latency_ms.keys() & other.latency_ms.keys()):
        first_ms, second_ms = one.latency_ms[batch], other.latency_ms[batch]
        shown = (f"{first_ms:.3g} ms", f"{second_ms:.3g} ms")
        pairs.append(_Pair(f"batch of {batch}", (first_ms, second_ms), shown))
    return pairs


def _bars(pair: _Pair, top: int) -> list[str]:
    longest = max(*pair.values, 1e-12)
    parts = [_text(_LEFT - 10, top + _BAR + 5, pair.label, f'{_SMALL} text-anchor="end"')]
    for index, (value, shown) in enumerate(zip(pair.values, pair.shown, strict=True)):
        y, length = top + index * _BAR, max(1.0, _FULL * value / longest)
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{_COLOURS[index]}"/>'
        )
        parts.append(_text(_LEFT + length + 6, y + _BAR - 4, shown))
    return parts


def _legend(report: Report) -> list[str]:
    parts, x = [], 12.0
    for colour, side in zip(_COLOURS, (report.original, report.packed), strict=True):
        parts.append(f'<rect x="{x:.0f}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 46, side.name))
        x += 40 + 7.2 * len(side.name)
    return parts


def _likeness(report: Report) -> str:
    found = report.difference
    top1 = "" if found.top1 is None else f", same first class in {found.top1:.1%} of {found.rows} rows"
    cosine = "" if found.cosine is None else f", cosine {found.cosine:.4f}"
    return f"drift {found.drift:.3g}{top1}{cosine}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {more or _SMALL}>{escape(text)}</text>'
