"""The Python environment of one version, requested by `install_py_dep_per_model` and `useVenv`.

TorchServe installs an archive's requirements into the unpacked archive. torchere installs them into a folder
next to it, or into a virtual environment of the version; the server's own environment is never changed. In
both cases the version runs in new worker processes, which search its packages before the server's. The folder
or virtual environment is deleted on unregister. Installing packages runs their code, so it is disabled by
default.
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
from torchere.serving.store.turns import Turns

logger = logging.getLogger(__name__)

AT_ONCE = 2  # concurrent installations; each uses one core
MAX_WAITING = 60
SHOWN_OUTPUT_CHARACTERS = 2000  # characters from the end of pip's output, where the error is
# No search for conflicts among all packages of the server: it took 1.7 of 2.3 s (pip 23.2, 187 packages), and
# its warnings would not be seen, as the output of an installation that succeeds is not shown.
_PIP_INSTALL = (
    *("-m", "pip", "install", "--upgrade"),
    *("--no-input", "--disable-pip-version-check", "--no-warn-conflicts"),
)


@dataclass(frozen=True, slots=True)
class Environment:
    """The Python environment of a version's workers, used instead of the server's."""

    python: str | None = None  # interpreter of the virtual environment
    packages: str | None = None  # folder that is first on the import path


class EnvironmentBuilder:
    """Builds environments for one server. Used on the event loop; cancelling a build kills its processes.

    Args:
        variables: the environment variables for pip and the packages' own scripts.
        timeout_s: limit of each of the two steps (creating the environment, installing), in seconds.
        installs: `install_py_dep_per_model`; False: requirements of archives are ignored.
    """

    def __init__(self, variables: Mapping[str, str], timeout_s: float, installs: bool) -> None:
        self._installs = installs
        self._variables = {**variables, "PYTHONSAFEPATH": "1", "PIP_NO_INPUT": "1"}
        self._timeout_s = timeout_s
        self._turns = Turns("installations of requirements", AT_ONCE, MAX_WAITING)

    async def build(
        self, model: str, directory: Path, manifest: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Environment | None:
        """Build the environment that an archive requests; None if it requests none or the server allows none.

        Args:
            model: the name of the model, for messages.
            directory: the unpacked archive; the environment is next to it.
            manifest: the archive's manifest.
            config: the archive's `model-config.yaml`.

        Raises:
            DependenciesFailed: with TorchServe's texts; the caller deletes a partly built environment.
            Unavailable: too many installations are queued.
        """
        file = (manifest.get("model") or {}).get("requirementsFile")
        requirements = file if self._installs and isinstance(file, str) else ""
        has_venv = config.get("useVenv") is True
        if not (has_venv or requirements):
            return None
        async with self._turns.take():
            if has_venv:
                environment = await self._make_venv(model, directory.parent / "venv")
            else:
                environment = Environment(packages=str(directory.parent / "packages"))
            if requirements:
                await self._install(model, directory, requirements, environment)
            return environment

    async def _make_venv(self, model: str, place: Path) -> Environment:
        failure = await self._run(venv_command(place), place.parent)
        if failure:
            raise DependenciesFailed(f"Virtual environment creation failed for model {model}", failure)
        show_server_packages(place)
        logger.info("Created virtual environment for model %s: %s", model, place)
        return Environment(python=str(place / "bin" / "python"))

    async def _install(self, model: str, directory: Path, file: str, environment: Environment) -> None:
        target = ["--target", environment.packages] if environment.packages else []
        python = environment.python or sys.executable
        logger.info(
            "Model %s waits for pip, which installs its requirements from %s; install_timeout_s=%g",
            *(model, file, self._timeout_s),
        )
        # Run in the archive's folder, because requirements may name wheels in it.
        failure = await self._run([python, *_PIP_INSTALL, *target, "-r", str(directory / file)], directory)
        if failure:
            detail = f"pip install -r {file}: {failure}"
            raise DependenciesFailed(f"Custom pip package installation failed for model {model}", detail)
        logger.info("Installed custom pip packages for model %s", model)

    async def _run(self, command: Sequence[str], cwd: Path) -> str:
        """Run a command to its end; return "" on success, otherwise the error text."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # so that killpg also kills its child processes
            )
        except OSError as err:
            return f"{command[0]}: {err.strerror}"
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except asyncio.TimeoutError:
            return f"not done within install_timeout_s={self._timeout_s:g}"
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # the process has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                await process.communicate()
        text = _errors_in(output.decode(errors="replace").strip())[-SHOWN_OUTPUT_CHARACTERS:]
        return "" if process.returncode == 0 else f"exit status {process.returncode}: {text}"


def _errors_in(text: str) -> str:
    """Return pip's output, starting at its first error, as one line.

    Return the whole output if it has no error line, or if a package build printed its own error.
    """
    lines = [line.strip() for line in text.splitlines()]
    first = next((index for index, line in enumerate(lines) if line.startswith("ERROR: ")), None)
    built = any(line.startswith("error: ") for line in lines)
    return text if first is None or built else " ".join(line for line in lines[first:] if line)


def venv_command(place: Path) -> list[str]:
    """Return the command that makes a virtual environment; `show_server_packages` may have to add pip."""
    # The environment can use the server's pip, if there is one; installing another one takes seconds.
    options = ["--without-pip"] if any(importlib.metadata.distributions(name="pip")) else []
    return [sys.executable, "-m", "venv", *options, str(place)]


def show_server_packages(venv: Path) -> None:
    """Add the server's packages (torch, the worker's code) to a virtual environment, after its own."""
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # "venv": since Python 3.11
    packages = Path(sysconfig.get_path("purelib", scheme, {"base": str(venv), "platbase": str(venv)}))
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # Editable installations need addsitedir, which also processes the .pth files of a folder.
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (packages / "torchere_server.pth").write_text("".join(lines), encoding="utf-8")
