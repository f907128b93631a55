"""Whether a model answers the same twice: if not, is it random, or does it remember?"""

from __future__ import annotations

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.dynamic import Tensors
from torchere.archiver.models.precision import FINE, differing
from torchere.archiver.models.running import Named, Run, run_on, seeded


def is_random(run: Run, example: Tensors, base: Named) -> bool:
    """Whether it answers the same twice from the same seed only.

    Args:
        run: the model.
        example: to run it on.
        base: what it has answered to that.

    Raises:
        ModelRefused: it doesn't then either, as it keeps state.
    """
    if differing(base, run_on(run, example), FINE) is None:
        return False
    if differing(seeded(run, example), seeded(run, example), FINE) is None:
        return True
    raise ModelRefused(
        "two runs on the same example differ, also with the same random numbers: the model keeps state from "
        "one run to the next, and what one client sends may reach another"
    )
