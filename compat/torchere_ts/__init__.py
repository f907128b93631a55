"""Makes `ts`, `model_archiver` and `workflow_archiver` importable in any Python process, backed by torchere.

`install` runs at each start of Python (`torchere_ts.pth`), so this module imports next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_ORIGIN = "torchere_ts"
ROOTS = ("ts", "model_archiver", "workflow_archiver")
# TorchServe's modules that make sense outside a worker only: where their names are defined.
OUTSIDE: dict[str, str] = {
    "ts.launcher": "torchere_ts.launcher",
    "ts.llm_launcher": "torchere_ts.llm_launcher",
    "ts.model_loader": "torchere_ts.loader",
    "ts.model_server": "torchere_ts.model_server",
    "ts.service": "torchere_ts.loader",
    "ts.metrics.metric_collector": "torchere.handlers.ts_compat.system_metrics",  # for `python -m`
    "ts.utils.hf_utils": "torchere_ts.llm_launcher",
    "ts.arg_parser": "torchere_ts.model_server",
    "model_archiver": "torchere_ts.archiver",
    "model_archiver.model_archiver": "torchere_ts.archiver",
    "model_archiver.model_archiver_config": "torchere_ts.archiver",
    "model_archiver.model_archiver_error": "torchere_ts.archiver",
    "model_archiver.model_packaging": "torchere_ts.archiver",
    "model_archiver.model_packaging_utils": "torchere_ts.archiver",
    "model_archiver.arg_parser": "torchere_ts.archiver",
    "model_archiver.manifest_components": "torchere_ts.archiver",
    "model_archiver.manifest_components.manifest": "torchere_ts.archiver",
    "model_archiver.manifest_components.model": "torchere_ts.archiver",
    "model_archiver.version": "torchere_ts.archiver",
    "workflow_archiver": "torchere_ts.workflows",
    "workflow_archiver.arg_parser": "torchere_ts.workflows",
    "workflow_archiver.version": "torchere_ts.workflows",
    "workflow_archiver.workflow_archiver_error": "torchere_ts.workflows",
    "workflow_archiver.workflow_packaging": "torchere_ts.workflows",
    "workflow_archiver.workflow_packaging_utils": "torchere_ts.workflows",
}


class _LastFinder:
    """The meta-path finder that is asked last: installed packages of these names take precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for one of TorchServe's modules; the parameters are the import system's."""
        root = fullname.partition(".")[0]
        if root not in ROOTS or (root != fullname and not _is_ours(root)):
            return None
        if fullname in OUTSIDE:
            is_package = any(name.startswith(f"{fullname}.") for name in OUTSIDE)
            return ModuleSpec(fullname, _Loader(), origin=_ORIGIN, is_package=is_package)
        if root == "ts":
            alias = importlib.import_module("torchere.handlers.ts_compat.alias")
            spec: ModuleSpec | None = alias.find_spec(fullname)
            return spec
        return None


def _is_ours(root: str) -> bool:
    spec = getattr(sys.modules.get(root), "__spec__", None)
    return spec is not None and spec.origin in (_ORIGIN, "torchere.handlers")


class _Loader(Loader):
    """Fills a module with the public names of the module that defines them."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code for `python -m`: it calls the function `main` of the module."""
        return compile(f"from {OUTSIDE[fullname]} import main\nmain()\n", f"<{fullname}>", "exec")

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(OUTSIDE[module.__name__])
        vars(module).update({name: getattr(source, name) for name in source.__all__})


_finder = _LastFinder()


def install() -> None:
    """Make the names importable in this process, unless packages of these names are installed. Idempotent."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
