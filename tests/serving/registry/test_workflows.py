"""Workflows of a start, beside clients that register some meanwhile."""

import asyncio
from typing import Any

from torchere.serving.config.server_settings import ServerSettings, SnapshotWorkflow
from torchere.serving.config.workflow_spec import read_workflow_spec
from torchere.serving.errors import Conflict
from torchere.serving.registry.workflows import Workflow, Workflows


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
