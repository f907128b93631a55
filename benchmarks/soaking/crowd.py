"""A crowd that comes and goes: more requests for a tiny model than the server can answer at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

from soaking.actors import Actor
from soaking.plant import FEATURES, Plant

CLIENTS = 32
STAYS_S = 15  # at most
_AT_LEAST_S = 120.0  # for its own start, and answers that are late
STAYS_AWAY_S = 90.0  # the server is as before the crowd, until the next one


class Crowd(Actor):
    """`torchere bench`, which has a process of its own, for seconds, again and again."""

    def __init__(self, plant: Plant, over: threading.Event, seed: int, stays_s: int = STAYS_S) -> None:
        super().__init__(plant, over, seed)
        body = Path(plant.temp.parent, "crowd.json")
        body.write_text(json.dumps({"x": [0.5] * FEATURES}))
        self._command = [
            sys.executable,
            "-m",
            "torchere.serving",
            "bench",
            "tiny",
            "--address",
            plant.inference,
        ]
        self._command += ["--clients", str(CLIENTS), "--seconds", str(stays_s)]
        self._command += ["--file", str(body), "--header", "content-type: application/json"]

    def act(self) -> None:
        """Come, ask, and go."""
        done = subprocess.run(
            self._command, capture_output=True, text=True, check=False, timeout=STAYS_S + _AT_LEAST_S
        )
        answered = re.search(r"(\d+) answers", done.stdout)
        if done.returncode or answered is None or re.search(r"^\d+ x ", done.stdout, re.MULTILINE):
            self.found(f"crowd: {done.stdout} {done.stderr}")
        else:
            self.tally["tiny"] += int(answered[1])
            self.tally["crowd"] += 1
        self.over.wait(STAYS_AWAY_S)
