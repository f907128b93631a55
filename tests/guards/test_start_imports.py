"""What may be imported to answer a command line, and to begin to serve: a module more is time for everybody.

No times here, which differ from machine to machine: `benchmarks/` has the row `cold_start`.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FRAMEWORK = {"fastapi", "pydantic", "anyio", "starlette.requests", "starlette.routing"}
COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton", "onnxruntime"}
EXTRAS = {"opentelemetry", "botocore", "httpx", "transformers", "tokenizers", "torchao", "PIL"}
TOOLS = {
    "torchere.client",
    "torchere.serving.bench",
    "torchere.serving.compare",
    "torchere.serving.migration",
    "torchere.serving.predict",
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
OURS_OF_SERVER = {
    "torchere.serving.registry.registry",
    "torchere.serving.frontend.rest.app",
    "torchere.handlers",
}


def imported_by(code: str, of: set[str]) -> set[str]:
    """Those of the modules that a fresh interpreter has after the code."""
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
    assert imported_by(f"import torchere.serving.cli as cli; cli.main({arguments!r})", unwanted) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_a_command_does_not_pay_for_the_others(arguments: list[str]) -> None:
    unwanted = TOOLS | {"torchere.archiver.cli", "torchere.serving.configuration", "yaml", "msgspec"}
    assert imported_by(f"import torchere.serving.cli as cli; cli.main({arguments!r})", unwanted) == set()


def test_a_server_begins_to_serve_without_the_framework() -> None:
    unwanted = FRAMEWORK | COMPILERS | EXTRAS | TOOLS
    assert imported_by("import torchere.serving.server, torchere.handlers.base", unwanted) == set()


def test_the_ports_are_made_without_the_framework() -> None:
    code = """
    from torchere.serving.frontend.rest.app import listener_of
    from torchere.serving.frontend.services import Services
    from torchere.serving.settings import ServerSettings
    from torchere.serving.telemetry.metrics import Metrics
    every = frozenset({"inference", "management", "metrics"})
    listener_of(every, None, None, Services(ServerSettings(), Metrics("host"), None, "1"))
    """
    assert imported_by(code, FRAMEWORK) == set()


def test_what_goes_beside_the_mapping_of_torch_is_needed_anyway_and_needs_no_torch() -> None:
    from torchere.serving.preparation import WITHOUT_TORCH

    wanted = set(WITHOUT_TORCH)
    assert imported_by("import torchere.serving.server", wanted) == wanted
    beside = f"import importlib; [importlib.import_module(name) for name in {sorted(wanted)!r}]"
    assert imported_by(beside, FRAMEWORK | EXTRAS | {"torch"}) == set()


def test_what_goes_beside_the_mapping_of_torch_never_waits_for_the_linker() -> None:
    code = """
    import importlib, sys
    from importlib.machinery import EXTENSION_SUFFIXES
    import torchere.serving.cli_serve, torchere.serving.start_signals, torchere.serving.vitals
    from torchere.serving.torch_mapping import EXTENSIONS

    def linked():
        specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
        origins = {str(getattr(spec, "origin", "")) for spec in specs}
        return {origin for origin in origins if origin.endswith(tuple(EXTENSION_SUFFIXES))}

    for name in EXTENSIONS:
        importlib.import_module(name)
    before = linked()
    from torchere.serving.preparation import WITHOUT_TORCH
    for name in WITHOUT_TORCH:
        importlib.import_module(name)
    print(len(before) > 0, *sorted(linked() - before))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True"]
