"""No module imports itself by way of others, not even for its types."""

from __future__ import annotations

import graphlib

import grimp

ROOMS = ("torchere.handlers", "torchere.archiver", "torchere.client")


def test_no_imports_form_a_circle() -> None:
    graph = grimp.build_graph(*ROOMS, cache_dir=None)  # imports under TYPE_CHECKING count
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
