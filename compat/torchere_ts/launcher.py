"""`ts.launcher`: starts and stops a server from Python, as TorchServe's tests and notebooks do."""

from __future__ import annotations

import subprocess
import threading
from queue import Full, Queue
from typing import IO, Any

__all__ = ["register_model", "register_model_with_params", "start", "stop"]

STARTED = "Model server started"
_HELD_LINES = 1000  # of output that no caller reads; later lines are dropped, as by TorchServe


def stop(wait: bool = True) -> None:
    """Stop the server that `start` started; with `wait`, return when it has ended."""
    subprocess.run(["torchserve", "--stop", *(["--foreground"] if wait else [])], check=False)


def start(  # noqa: PLR0917  # TorchServe's signature
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | None = None,
    enable_model_api: bool = False,
) -> Queue[str | None]:
    """Start a server, after stopping one that runs, and return once it has started.

    Its output is printed.

    Returns:
        A queue with the further lines of its output; None when it has ended.
    """
    stop()
    values = {
        "--model-store": model_store,
        "--plugins-path": plugin_folder,
        "--ts-config": snapshot_file,
        "--models": models,
    }
    switches = {
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
    }
    command = ["torchserve", "--start"]
    for option, value in values.items():
        command += [option, value] if value else []
    command += [option for option, given in switches.items() if given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout
    assert output is not None  # a pipe
    for line in output:
        print(line.rstrip())
        if STARTED in line:
            break
    lines: Queue[str | None] = Queue(_HELD_LINES)
    threading.Thread(target=_follow, args=(output, lines), daemon=True).start()
    return lines


def _follow(output: IO[str], lines: Queue[str | None]) -> None:
    """Print the output and add its lines to the queue, until the server ends."""
    for line in output:
        print(line.rstrip())
        try:
            lines.put_nowait(line)
        except Full:
            continue
    if lines.full():
        lines.get_nowait()
    lines.put(None)


def register_model_with_params(params: Any) -> Any:
    """Register a model with these query parameters; return the response of `requests`."""
    import requests  # noqa: PLC0415  # not a dependency of torchere

    return requests.post("http://localhost:8081/models", params=params, timeout=300)


def register_model(model_name: str, url: str) -> Any:
    """Register a model with one worker, and wait until it has loaded."""
    settings = {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    return register_model_with_params(settings)
