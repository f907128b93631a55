"""Runs the suite of real clients against Triton, to see where the suite itself is wrong about the protocol.

    python tests/clients/against_triton.py [pytest's arguments]

Triton is the `tritonserver` of the nvidia-pytriton wheel in `.peers/triton`, which `benchmarks/run.py`
builds. What differs on purpose is in docs/differences.md.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# KServe's SDK wants JSON from the health routes, where Triton answers nothing but a status.
NOT_TRITONS = "tests/clients/test_kserve.py::test_server_and_models_are_ready"

if __name__ == "__main__":
    environment = {**os.environ, "TORCHERE_CLIENTS_TARGET": "triton"}
    command = [sys.executable, "-m", "pytest", "tests/clients", "--deselect", NOT_TRITONS, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode)
