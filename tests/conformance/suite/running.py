"""Runs the checks of TorchServe's tests against a deployment, and compares two runs."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from suite.checks import Check
from suite.deployment import deployment
from suite.groups import GROUPS, Group
from suite.models import build

# Checks that TorchServe 0.12.0 passes and torchere does not, with the section of docs/differences.md on them.
# With `strict_compatibility=true` torchere passes them, too: the groups `strict` and `strict-control`.
DIFFERS: Mapping[str, str] = {
    **{
        f"management_data.json: {title}": "Numbers have to be numbers"
        for title in (
            "Batch size that is no number",
            "UnRegister what came of it",
            "Delay that is no number",
            "UnRegister what came of that",
            "Both are nan",
            "Negative workers",
        )
    },
    "test_auto_recover.py: an answer that takes too long": "A handler that takes too long answers 504",
    "test_model_control_mode.py: register and unregister are off": (
        "Error bodies on the management port carry a detail"
    ),
}


def name_of(check: Check) -> str:
    return f"{check.file}: {check.title}"


def outcomes(group: Group, folder: Path, bin: Path) -> Iterator[tuple[Check, str]]:
    """Yield each check with its failure, or "" where it holds; `bin` has the `torchserve` to run."""
    store, downloads = folder / "store", folder / "downloads"
    store.mkdir(parents=True)
    build(store)
    shutil.copytree(store, downloads)
    for name in ("only_here", "digits", "fetched"):  # not in the store, where they may be fetched to
        shutil.copy(store / "ok.mar", downloads / f"{name}.mar")
    with deployment(folder, bin) as at:
        try:
            group.begin(at)
        except Exception as err:
            yield from ((check, f"the start failed: {err!r}") for check in group.checks)
            return
        for check in group.checks:
            try:
                check.run(at)
            except Exception as err:
                yield check, f"{type(err).__name__}: {err}"
            else:
                yield check, ""


def table(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return a Markdown table of the checks that hold, by test file upstream."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for group in GROUPS:
        for check in group.checks:
            by_file[check.file].append(name_of(check))
    lines = ["| test file | checks | TorchServe 0.12.0 | torchere |", "| --- | --- | --- | --- |"]
    total = [0, 0, 0]
    for file, names in by_file.items():
        row = [len(names), *(sum(not run.get(name, "not run") for name in names) for run in (theirs, ours))]
        total = [one + other for one, other in zip(total, row, strict=True)]
        lines.append(f"| {file} | {row[0]} | {row[1]} | {row[2]} |")
    return "\n".join([*lines, f"| all | {total[0]} | {total[1]} | {total[2]} |"])
