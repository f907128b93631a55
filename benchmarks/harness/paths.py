"""Where things lie; nothing outside the checkout and the system's folder for temporary files is written."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"  # one virtual environment per peer, never the project's own
SCRIPTS = ROOT / "benchmarks" / "peers"  # what runs inside those environments
RESULTS = ROOT / ".bench"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "throughput.svg"
