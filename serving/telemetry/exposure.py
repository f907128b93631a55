"""All metrics at one moment, and their text. Taken on the event loop, written wherever there is time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import Metric

from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.exposition import render
from torchere.serving.telemetry.families import Families
from torchere.serving.telemetry.load_metrics import VersionLoad, load_families
from torchere.serving.telemetry.numbers import VersionSnapshot
from torchere.serving.telemetry.openmetrics import render_openmetrics
from torchere.serving.telemetry.process_metrics import ProcessMetrics
from torchere.serving.telemetry.version_families import version_families


@dataclass(frozen=True, slots=True)
class States:
    """The states there are, for metrics that are 1 for one of them and 0 for the others."""

    executor: tuple[str, ...] = ()
    version: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exposure:
    """What only the event loop may look at, copied; `families` and `process` are for any thread."""

    families: Families
    plain: Callable[[], Iterable[Metric]]  # TorchServe's metrics that are kept as plain numbers
    versions: Mapping[tuple[str, str], VersionSnapshot]  # by model and version
    loads: Mapping[tuple[str, str], VersionLoad]  # likewise
    states: States
    refused: Mapping[str, int]  # requests turned away before their model was known, by reason
    over_budget: Mapping[str, int]  # refusals, by budget
    server: Mapping[str, float]  # by the name of a family without labels
    process: ProcessMetrics

    def text(self, names: Collection[str] = (), *, openmetrics: bool = False) -> str:
        """The text of a scrape; only the samples called `names` when there are any. Any thread may ask."""
        form = render_openmetrics if openmetrics else render
        declared = self.families.declared | catalogue.LIBRARY_COUNTERS
        return form(self._collect(), declared, names)

    def _collect(self) -> Iterable[Metric]:
        yield from self.plain()
        yield from self.families.registry.collect()
        yield from version_families(self.versions, self.refused)
        yield from load_families(self.loads, self.states.executor, self.states.version)
        for name, value in self.server.items():
            family = catalogue.family(name)
            family.add_sample(name, {}, value)
            yield family
        family = catalogue.family(catalogue.BUDGET_REFUSED)
        for budget, count in self.over_budget.items():
            family.add_sample(catalogue.BUDGET_REFUSED, {"budget": budget}, count)
        yield family
        yield from self.process.collect()
