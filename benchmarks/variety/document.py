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
_IS_SLOWER, _DRIFTS = "is not faster than fp32", "answers too differently"
_SHORT = {"slower": re.compile(_IS_SLOWER), "drifts": re.compile(f"{_DRIFTS}|has lost outputs")}
_RUN = re.compile(r"(?:\*\*(?P<status>\w+)\*\*)? ?(?:(?P<ratio>[\d.]+) ×, (?P<difference>\S+))?")
_LISTED = re.compile(r"refused \((\d+)\)")


def kept_cells(document: str, entries: Sequence[Entry]) -> Results:
    """Return the cells of the document's table for `entries`, with figures as they are printed there."""
    made = document.partition(_BEGIN)[2].partition(_END)[0]
    notes = dict(re.findall(r"^(\d+)\. (.*)$", made, re.MULTILINE))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.split("\n") if line[:1] == "|"]
    keys = {entry.title: entry.key for entry in entries}
    cells: Results = {}
    for title, _kind, target, *shown in rows[2:]:
        for method, text in zip(rows[0][3:], shown, strict=True):
            cell = _cell(text, notes)
            if title in keys and cell:
                cells[keys[title], target, method] = cell
    return cells


def _cell(text: str, notes: dict[str, str]) -> Cell | None:
    if found := _LISTED.fullmatch(text):
        return Cell(REFUSED, notes[found[1]])
    if text in _SHORT:
        return Cell(REFUSED, {"slower": _IS_SLOWER, "drifts": _DRIFTS}[text])
    found = _RUN.fullmatch(text) if text else None
    if found is None:
        return None
    difference, ratio = (float(found[name]) if found[name] else None for name in ("difference", "ratio"))
    return Cell(found["status"] or PACKED, "", difference, ratio)


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
        f"The last were measured {machine.date[:10]} on {machine.cpu}, PyTorch {machine.torch} (commit "
        f"{machine.commit}), the others by runs before; each while other work ran on the same cores.\n"
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
    for short, pattern in _SHORT.items():
        if pattern.search(cell.line):
            return short
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
