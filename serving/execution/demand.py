"""Whether the batches of a tiny model are more than the event loop should run. Pure but for its counts."""

from __future__ import annotations

WINDOW_S = 0.5
HIGH_SHARE = 0.25  # of a core: from here on a worker process is worth starting
LOW_SHARE = 0.1  # of a core: below this one that runs is not worth keeping
PILED_SHARE = 0.5  # of the work has to come in batches that pile up; else requests seldom wait for others


class Demand:
    """What share of a core a model's batches take, and whether they come faster than they are run."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._work_s = 0.0
        self._piled_s = 0.0
        self._last_high_s = 0.0

    def add(self, now_s: float, work_s: float, *, is_piled: bool) -> bool:
        """Count a batch that takes `work_s` on the loop; `is_piled`: there are requests enough for two.

        Returns:
            Whether a window ends now, and what came in it was too much for one core.
        """
        self._work_s += work_s
        self._piled_s += work_s if is_piled else 0.0
        elapsed_s = now_s - self._began_s
        if elapsed_s < WINDOW_S:
            return False
        share, piled_share = self._work_s / elapsed_s, self._piled_s / (self._work_s or 1.0)
        self._began_s, self._work_s, self._piled_s = now_s, 0.0, 0.0
        if share >= LOW_SHARE:
            self._last_high_s = now_s
        return share >= HIGH_SHARE and piled_share >= PILED_SHARE

    def low_for_s(self, now_s: float) -> float:
        """Seconds since a window last had more than next to nothing to do."""
        return now_s - self._last_high_s
