"""The chaos tests use the servers of the end-to-end tests."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "torchere_e2e_conftest", Path(__file__).parents[1] / "e2e" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)

store = _e2e.store
pack = _e2e.pack
start_server = _e2e.start_server
