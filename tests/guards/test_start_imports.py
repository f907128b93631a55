"""What may be imported to answer a command line, and to begin to serve: a module more is time for everybody.

No times here, which differ from machine to machine: `benchmarks/` has the row `cold_start`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORK = {"anyio", "starlette.requests", "starlette.routing"}
COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton", "onnxruntime"}
EXTRAS = {"opentelemetry", "botocore", "httpx", "transformers", "tokenizers", "torchao", "PIL"}
TOOLS = {
    "torchere.client",
    "torchere.serving.commands.bench",
    "torchere.serving.commands.compare",
    "torchere.serving.commands.migrate",
    "torchere.serving.commands.predict",
}
SERVER = {
    "torch",
    "numpy",
    "grpc",
    "google.protobuf",
    "uvloop",
    "prometheus_client",
    "psutil",
    "PIL",
}
NOT_OF_WORKERS = {  # of all: those that need them import them
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torchere.handlers.loading.parallel",
    "torchere.serving.config.server_settings",
    "torchere.serving.store.package",
    "yaml",
}
NOT_BEFORE_TORCH = {  # modules for which the fork server, which imports torch, would have to wait
    "asyncio",
    "importlib.metadata",
    "msgspec",
    "torchere.archiver.reader",
    "torchere.archiver.scan",
    "torchere.handlers.context",
    "torchere.serving.config.model_settings",
    "torchere.serving.workers.launch",
    "yaml",
}
UP_TO_THE_FORK_SERVER = """
from torchere.serving.commands import cli
from torchere.serving.workers import spawn
def spawned(*arguments): raise SystemExit
spawn.spawn = spawned
try:
    cli.main(["serve", "--model-store", ".", "--models", "m.mar", "--ncs"])
    raise RuntimeError("it began to serve without a fork server")
except SystemExit:
    pass
"""
OURS_OF_SERVER = {
    "torchere.serving.registry.registry",
    "torchere.serving.frontend.rest.server",
    "torchere.handlers",
}


def imported_by(code: str, of: set[str]) -> set[str]:
    """Those of the modules that a fresh interpreter has after the code."""
    code = code.strip().replace("\n", "\n    ")
    found = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(*set({of!r}) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", found], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["version"],
        ["serve", "--help"],
        ["archive", "--help"],
        ["inspect", "--help"],
        ["predict", "--help"],
        ["bench", "--help"],
        ["config", "check", "--help"],
    ],
)
def test_saying_how_a_command_is_used_imports_no_server(arguments: list[str]) -> None:
    unwanted = SERVER | OURS_OF_SERVER | FRAMEWORK | COMPILERS | EXTRAS
    assert (
        imported_by(f"from torchere.serving.commands import cli; cli.main({arguments!r})", unwanted) == set()
    )


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_a_command_does_not_pay_for_the_others(arguments: list[str]) -> None:
    unwanted = TOOLS | {"torchere.archiver.cli", "torchere.serving.config.resolve", "yaml", "msgspec"}
    assert (
        imported_by(f"from torchere.serving.commands import cli; cli.main({arguments!r})", unwanted) == set()
    )


def test_a_server_imports_what_it_needs_only() -> None:
    unwanted = COMPILERS | EXTRAS | TOOLS | {"pydantic"}
    assert imported_by("import torchere.serving.server, torchere.handlers.base", unwanted) == set()


def test_a_server_begins_to_serve_without_torch() -> None:
    every = "torchere.serving.server, torchere.serving.frontend.rest.routes, torchere.serving.commands.serve"
    assert imported_by(f"import {every}", {"torch"}) == set()


def test_the_fork_server_starts_before_the_server_is_imported() -> None:
    unwanted = NOT_BEFORE_TORCH | SERVER | OURS_OF_SERVER | FRAMEWORK
    assert imported_by(UP_TO_THE_FORK_SERVER, unwanted - {"torchere.handlers"}) == set()


def test_a_fork_server_imports_what_each_worker_needs() -> None:
    unwanted = FRAMEWORK | COMPILERS | EXTRAS | TOOLS | NOT_OF_WORKERS
    found = imported_by("import torchere.serving.workers.fork_server", unwanted)
    assert found - imported_by("import torch", unwanted) == set()
