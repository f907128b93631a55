"""Workflows of a start, beside clients that register some meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any

from torchere.serving.config.server_settings import ServerSettings, SnapshotWorkflow
from torchere.serving.config.workflow_spec import read_workflow_spec
from torchere.serving.errors import Conflict, ModelNotFound
from torchere.serving.registry.workflows import Workflow, Workflows
from torchere.serving.types import ModelKey


class _Registry:
    """Knows no model."""

    workflows: Any = None


class _Refusing(Workflows):
    """Answers each registration as that of a name that is registered."""

    async def register(self, wanted: SnapshotWorkflow, *, at_startup: bool = False) -> Workflow:
        raise Conflict(f"Workflow {wanted.name} is already registered.")


def test_a_workflow_of_the_start_that_a_client_was_faster_to_register_is_not_missing():
    registry: Any = _Registry()
    workflows = _Refusing(ServerSettings(), registry)
    workflows._workflows["there"] = Workflow("there", "there.war", read_workflow_spec("dag:\n  start: []\n"))
    wanted = [SnapshotWorkflow(f"{name}.war", name) for name in ("there", "lost")]
    asyncio.run(workflows.load_at_startup(wanted))
    assert workflows.missing() == ("lost",)
    assert [entry["workflowName"] for entry in workflows.to_restore()] == ["there", "lost"]


def test_a_step_that_a_client_unregisters_during_the_start_does_not_end_it():
    registry: Any = _Registry()
    chosen: list[str] = []

    def set_default(model: str, version: str) -> None:
        if model == "flow__gone":
            raise ModelNotFound.named(model)
        chosen.append(model)

    registry.set_default = set_default
    workflows = Workflows(ServerSettings(), registry)
    steps: Any = [SimpleNamespace(key=ModelKey(f"flow__{step}", "1.0")) for step in ("gone", "there")]
    workflows._restore_defaults(steps)
    assert chosen == ["flow__there"]
