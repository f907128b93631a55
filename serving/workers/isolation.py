"""Chooses threads, processes or a shared process for a version, as a pure function of its archive."""

from __future__ import annotations

from typing import Any

from torchere.handlers.built_in import BUILT_IN_HANDLERS
from torchere.serving.config.server_settings import Isolation, Placement

COMPILED_SUFFIXES = (".pt", ".pt2")  # models whose forward runs no Python code of the archive

# Whether the executors of a version are lanes of one process, on one copy of the weights.
LANES_SHARE: dict[Placement, bool] = {"thread": True, "process": False, "shared": True}


def choose_isolation(
    wanted: Isolation,
    handler: str,
    manifest_model: dict[str, Any],
    *,
    holds_gil: bool = False,
    on_gpu: bool = False,
    needs_own_process: bool = False,
) -> Placement:
    """Resolve the `wanted` isolation for an archive with this handler and manifest `model` section.

    `holds_gil`: the model is known to keep the GIL while it runs, so that threads would run it in turn.

    `on_gpu`: the version runs on a GPU, where an input that fails in CUDA (an index out of range) costs the
    process all its GPU state.

    `needs_own_process`: the version keeps state between requests, changes process-wide settings, or has a
    sandbox that is its own.

    `shared` shares a process with other versions where `auto` uses threads, and otherwise equals `auto`.

    `auto` uses threads only if the archive has no Python code of its own: a handler file may rely on being
    alone in its process (module globals, `os.environ`, `chdir`), a model file on the GIL.
    """
    if wanted in ("thread", "process"):
        return wanted
    compiled = str(manifest_model.get("serializedFile", "")).endswith(COMPILED_SUFFIXES)
    own_python = handler not in BUILT_IN_HANDLERS or "modelFile" in manifest_model
    if not compiled or own_python or holds_gil or on_gpu:
        return "process"
    return "shared" if wanted == "shared" and not needs_own_process else "thread"
