"""The harness lies beside `benchmarks/run.py`, which finds it because Python puts a script's folder first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
