"""The suite's servers: torchere by default, Triton with `TORCHERE_CLIENTS_TARGET=triton`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.http

sys.path.insert(0, str(Path(__file__).resolve().parent))

from oip_suite import torchere_target, triton_target
from oip_suite.target import Target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("clients")
    start = (
        triton_target.serving
        if os.environ.get("TORCHERE_CLIENTS_TARGET") == "triton"
        else torchere_target.serving
    )
    with start(folder) as running:
        yield running


@pytest.fixture
def http(target: Target) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(target.http) as client:
        yield client


@pytest.fixture
def grpc(target: Target) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(target.grpc) as client:
        yield client
