"""A Python environment for one version: what `install_py_dep_per_model` and `useVenv` ask for.

TorchServe installs an archive's requirements into the unpacked archive. Here they go into a folder beside it,
or into a virtual environment of the version; the server's own environment is never changed. Either way the
version runs in worker processes started afresh, which find its packages first and the server's after them.
Both are deleted on unregister. Installing runs code of packages: it is off unless the operator asks for it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchere.serving.errors import DependenciesFailed
from torchere.serving.store.fetch import Turns

logger = logging.getLogger(__name__)

AT_ONCE = 2  # each keeps a core busy
MAX_WAITING = 60
SHOWN_OUTPUT_CHARACTERS = 2000  # the end of pip's output says what went wrong
_PIP_INSTALL = ("-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--upgrade")


@dataclass(frozen=True, slots=True)
class Environment:
    """What a version's workers run in, instead of the server's environment."""

    python: str | None = None  # interpreter of its virtual environment
    packages: str | None = None  # folder that comes first on the import path


@dataclass(frozen=True, slots=True)
class EnvironmentPlan:
    """What there is to do for one archive."""

    venv: bool = False
    requirements: str | None = None  # file in the archive to install

    def __bool__(self) -> bool:
        return self.venv or self.requirements is not None


def plan_environment(
    install: bool, manifest: Mapping[str, Any], config: Mapping[str, Any]
) -> EnvironmentPlan:
    """What an archive asks for and the server allows.

    Args:
        install: `install_py_dep_per_model`.
        manifest: The archive's manifest.
        config: Its `model-config.yaml`.
    """
    requirements = (manifest.get("model") or {}).get("requirementsFile")
    return EnvironmentPlan(
        venv=config.get("useVenv") is True,
        requirements=requirements if install and isinstance(requirements, str) else None,
    )


class EnvironmentBuilder:
    """Builds environments for one server. Used on the event loop; cancelling a build ends its processes.

    Args:
        variables: The environment variables that pip and the packages' own scripts get.
        timeout_s: For each of the two steps.
    """

    def __init__(self, variables: Mapping[str, str], timeout_s: float) -> None:
        self._variables = {**variables, "PYTHONSAFEPATH": "1", "PIP_NO_INPUT": "1"}
        self._timeout_s = timeout_s
        self._turns = Turns("installations of requirements", AT_ONCE, MAX_WAITING)

    async def build(self, model: str, directory: Path, plan: EnvironmentPlan) -> Environment | None:
        """Make what the plan says, in the parent of `directory`, the unpacked archive; None without a plan.

        Raises:
            DependenciesFailed: with TorchServe's texts; what was made is left for the caller to delete.
            Unavailable: too many others wait already.
        """
        if not plan:
            return None
        async with self._turns.take():
            return await self._build(model, directory, plan)

    async def _build(self, model: str, directory: Path, plan: EnvironmentPlan) -> Environment:
        environment = Environment()
        if plan.venv:
            environment = await self._make_venv(model, directory.parent / "venv")
        elif plan.requirements:
            environment = Environment(packages=str(directory.parent / "packages"))
        if plan.requirements:
            await self._install(model, directory, plan.requirements, environment)
        return environment

    async def _make_venv(self, model: str, place: Path) -> Environment:
        # The server's own pip is seen from there, if it has one; making another takes seconds.
        options = ["--without-pip"] if any(importlib.metadata.distributions(name="pip")) else []
        failure = await self._run([sys.executable, "-m", "venv", *options, str(place)], place.parent)
        if failure:
            raise DependenciesFailed(f"Virtual environment creation failed for model {model}", failure)
        _show_server_packages(place)
        logger.info("Created virtual environment for model %s: %s", model, place)
        return Environment(python=str(place / "bin" / "python"))

    async def _install(self, model: str, directory: Path, file: str, environment: Environment) -> None:
        target = ["--target", environment.packages] if environment.packages else []
        python = environment.python or sys.executable
        # In the archive's folder, as requirements may name wheels that lie beside them.
        failure = await self._run([python, *_PIP_INSTALL, *target, "-r", str(directory / file)], directory)
        if failure:
            raise DependenciesFailed(f"Custom pip package installation failed for model {model}", failure)
        logger.info("Installed custom pip packages for model %s", model)

    async def _run(self, command: Sequence[str], cwd: Path) -> str:
        """Run a command to its end; "" when it succeeded, otherwise what went wrong."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # to end what it started, too
            )
        except OSError as err:
            return f"{command[0]}: {err.strerror}"
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except asyncio.TimeoutError:
            return f"not done within install_timeout_s={self._timeout_s:g}"
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it ended just now
                    os.killpg(process.pid, signal.SIGKILL)
                await process.communicate()
        text = _errors_in(output.decode(errors="replace").strip())[-SHOWN_OUTPUT_CHARACTERS:]
        return "" if process.returncode == 0 else f"exit status {process.returncode}: {text}"


def _errors_in(text: str) -> str:
    """Pip's output from its first error on, in one line; all where there is none, or a build drew its own."""
    lines = [line.strip() for line in text.splitlines()]
    first = next((index for index, line in enumerate(lines) if line.startswith("ERROR: ")), None)
    built = any(line.startswith("error: ") for line in lines)
    return text if first is None or built else " ".join(line for line in lines[first:] if line)


def _show_server_packages(venv: Path) -> None:
    """Let a virtual environment see the server's packages after its own: torch, and the worker's code."""
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # the former from 3.11 on
    packages = Path(sysconfig.get_path("purelib", scheme, {"base": str(venv), "platbase": str(venv)}))
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # addsitedir also reads the folder's own .pth files, as editable installations need it.
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (packages / "torchere_server.pth").write_text("".join(lines), encoding="utf-8")
