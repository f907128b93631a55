"""Each test that asks for `call` runs with the synchronous and with the asyncio client."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scripted_transport import AsyncioModule, Caller, Clock, TimeModule


@pytest.fixture(params=["blocking", "asyncio"])
def call(request: pytest.FixtureRequest) -> Caller:
    return Caller(request.param == "asyncio")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("client", "transport"):
        monkeypatch.setattr(f"torchere.client.{module}.time", TimeModule(made))
    monkeypatch.setattr("torchere.client.async_client.asyncio", AsyncioModule(made))
    return made
