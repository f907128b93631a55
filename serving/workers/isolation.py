"""Chooses threads, processes or a shared process for a version, by its archive and its settings alone."""

from __future__ import annotations

from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.built_in import BUILT_IN_HANDLERS
from torchere.serving.config.server_settings import ModelSettings, Placement
from torchere.serving.store.package import StoredArchive

COMPILED_SUFFIXES = (".pt", ".pt2")  # models whose forward runs no Python code of the archive

# Whether the executors of a version are lanes of one process, on one copy of the weights.
LANES_SHARE: dict[Placement, bool] = {"thread": True, "process": False, "shared": True}


def choose_isolation(
    archive: StoredArchive, settings: ModelSettings, handler: str, *, may_share: bool
) -> Placement:
    """Resolve the isolation that the settings ask for.

    `may_share`: the sandbox allows that the process is shared with other versions.

    `shared` shares a process with other versions where `auto` uses threads, and otherwise equals `auto`. A
    version that changes process-wide settings shares none.

    `auto` uses threads only if the archive has no Python code of its own: a handler file may rely on being
    alone in its process (module globals, `os.environ`, `chdir`), a model file on the GIL. A model that keeps
    the GIL while it runs would run in turn in threads. On a GPU, an input that fails in CUDA (an index out of
    range) costs the process all its GPU state.
    """
    wanted, model = settings.isolation, archive.manifest.get("model") or {}
    if wanted in ("thread", "process"):
        return wanted
    compiled = str(model.get("serializedFile", "")).endswith(COMPILED_SUFFIXES)
    own_python = handler not in BUILT_IN_HANDLERS or "modelFile" in model
    if not compiled or own_python or archive.holds_gil or settings.gpu_ids:
        return "process"
    on_xla = settings.device_type == "xla"
    may_share = may_share and not (on_xla or _switches_engine(archive) or archive.has_python)
    return "shared" if wanted == "shared" and may_share else "thread"


def _switches_engine(archive: StoredArchive) -> bool:
    """Return whether the archive's int8 weights need a quantized engine, which is set once per process."""
    try:
        return TorchScriptOptions.read(archive.config.raw).quantized_engine is not None
    except ValueError:  # the load reports it
        return False
