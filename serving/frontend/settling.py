"""What a call waits for that changed what is wanted of a version."""

from __future__ import annotations

import asyncio

from torchere.serving.errors import Conflict
from torchere.serving.registry.version import Version

_TURNS_TO_BEGIN = 2  # of the loop: the reconciler's task begins, and then the pool's work does


async def begun() -> None:
    """Let the reconciler begin, if it can, for a client that does not wait until it is done.

    From there on the executors that are to be count, as they do in TorchServe before it answers: requests
    wait for them, and `describe` lists them. A client on the same machine asks again within a millisecond.
    A reconciler that is at something else (a drain, say) begins later, and nobody waits for that.
    """
    for _ in range(_TURNS_TO_BEGIN):
        await asyncio.sleep(0)


async def settled(version: Version) -> None:
    """Wait until a version is what is wanted of it; raises Conflict when that is by now: to be gone."""
    await version.settled.wait()
    if not version.wanted:
        name, number = version.key
        raise Conflict(f"Model version {number} of model {name} was unregistered while it was loading")
