"""Threads, processes or a shared process for a version: a pure choice from what its archive holds."""

from __future__ import annotations

from typing import Any, Literal

from torchere.handlers.resolve import BUILT_IN_HANDLERS
from torchere.serving.config.server_settings import Isolation

COMPILED_SUFFIXES = (".pt", ".pt2")  # models whose forward needs no Python of the archive's own


def choose_isolation(
    wanted: Isolation,
    handler: str,
    manifest_model: dict[str, Any],
    *,
    holds_gil: bool = False,
    on_gpu: bool = False,
    needs_own_process: bool = False,
) -> Literal["thread", "process", "shared"]:
    """What `wanted` comes to for an archive with this handler and manifest `model` section.

    `holds_gil`: the model is known to keep the GIL while it runs, so that threads would run it in turn.

    `on_gpu`: an input that CUDA trips over (an index out of range) costs the process all it has on the GPU.

    `needs_own_process`: it keeps a state between requests, or switches what belongs to the whole process.

    `shared` shares a process with other versions where `auto` takes threads, and is `auto` elsewhere.

    `auto` takes threads only where the archive brings no Python of its own: a handler file may rely on being
    alone in its process (module globals, `os.environ`, `chdir`), a model file on the GIL.
    """
    if wanted in ("thread", "process"):
        return wanted
    compiled = str(manifest_model.get("serializedFile", "")).endswith(COMPILED_SUFFIXES)
    own_python = handler not in BUILT_IN_HANDLERS or "modelFile" in manifest_model
    if not compiled or own_python or holds_gil or on_gpu:
        return "process"
    return "shared" if wanted == "shared" and not needs_own_process else "thread"
