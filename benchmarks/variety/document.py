"""The table of `docs/formats.md`: every model, format and method."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.machine import Machine
from harness.report import markdown_table

from variety.catalogue import Entry
from variety.trial import FORMATS, METHODS, PACKED, REFUSED, Cell

Results = dict[tuple[str, ...], Cell]
_BEGIN, _END = "<!-- begin: benchmarks/formats.py -->", "<!-- end: benchmarks/formats.py -->"
_COLUMNS = (*METHODS, "int8-trained")
_SLOWER = re.compile(r"is not faster than fp32")
_DRIFTS = re.compile(r"answers too differently|has lost outputs")


def with_section(document: str, made: str) -> str:
    """Return the document with the section between its marks replaced."""
    before, _, rest = document.partition(_BEGIN)
    _, mark, after = rest.partition(_END)
    if not mark:
        raise ValueError(f"the document lacks {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n{made}\n{_END}{after}"


def table(results: Results, entries: Sequence[Entry]) -> list[list[str]]:
    """Return one line for each model and format, for a terminal."""
    return _lines(results, entries, [])


def section(results: Results, entries: Sequence[Entry], machine: Machine) -> str:
    """Return the section for the document."""
    notes: list[str] = []
    lines = _lines(results, entries, notes)
    shown = {name: one for name, one in results.items() if name[0] in {entry.key for entry in entries}}
    count = {status: sum(one.status == status for one in shown.values()) for status in (PACKED, REFUSED)}
    others = len(shown) - sum(count.values())
    kinds = len({entry.kind for entry in entries})
    intro = (
        f"{len(entries)} models of {kinds} kinds, {len(shown)} trials: {count[PACKED]} packed, "
        f"{count[REFUSED]} refused, {others or 'none'} crashed, late or wrong. "
        f"Measured {machine.date[:10]} on {machine.cpu}, PyTorch {machine.torch} (commit {machine.commit}).\n"
    )
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return "\n".join([intro, markdown_table(lines), "", "Refusals:\n", listed])


def _lines(results: Results, entries: Sequence[Entry], notes: list[str]) -> list[list[str]]:
    lines = [["model", "kind", "format", *_COLUMNS]]
    for entry in entries:
        for target in FORMATS:
            cells = [results.get((entry.key, target, method)) for method in _COLUMNS]
            if any(cells):
                lines.append([entry.title, entry.kind, target, *(_shown(one, notes) for one in cells)])
    return lines


def _shown(cell: Cell | None, notes: list[str]) -> str:
    if cell is None:
        return ""
    if cell.status != REFUSED:
        figures = "" if cell.ratio is None else f"{cell.ratio:.2f} ×, {cell.difference:.0e}"
        return figures if cell.status == PACKED else f"**{cell.status}** {figures}".strip()
    if _SLOWER.search(cell.line):
        return "slower"
    if _DRIFTS.search(cell.line):
        return "drifts"
    return f"refused ({_number(cell.line, notes)})"


def _number(line: str, notes: list[str]) -> int:
    """Return the number of the note with this line, which may differ in figures and paths."""
    alike = [_plain(note) for note in notes]
    if _plain(line) not in alike:
        notes.append(re.sub(r"/tmp/[^\s:;,]+/", "", line))
        return len(notes)
    return alike.index(_plain(line)) + 1


def _plain(line: str) -> str:
    return re.sub(r"/tmp/[^\s:;,]+/|[0-9.]+", "", line)
