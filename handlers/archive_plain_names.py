"""Plain names for the modules of the only archive in a process.

Handlers that are written for a process of their own rely on names: a pickle in the archive refers to
`model.Net`, a child process imports `model`. In a worker process that hosts a single archive, its modules can
have those names. The names are tried last, after everything else that the process can import. They lead to
the same modules that the archive's own imports use, so that each class exists once.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from torchere.handlers.archive_import import ArchiveModules


class _PlainNameFinder:
    """First finder in the meta path; it resolves only names that nothing else in the process has.

    Otherwise the import system would find the modules a second time, in the folder of the archive, which is
    on `sys.path`, and in the `__path__` of its packages.
    """

    def __init__(self, archive: ArchiveModules) -> None:
        self.archive = archive

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that leads to the private module; the parameters are the import system's."""
        if not self.archive.owns(fullname.partition(".")[0]) or not self.archive.has_plain_name(fullname):
            return None
        private = f"{self.archive.prefix}.{fullname}"
        if private not in sys.modules and importlib.util.find_spec(private) is None:
            return None
        return ModuleSpec(fullname, _PlainNameLoader(self.archive))


class _PlainNameLoader(Loader):
    """Loader that returns the archive's own module under its plain name."""

    def __init__(self, archive: ArchiveModules) -> None:
        self._archive = archive
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._archive.load(spec.name)
        self._own_spec = getattr(module, "__spec__", None)  # code may have replaced its module by any object
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module ran when it was loaded. Since then the import system has set the plain name's spec on it.
        if self._own_spec is not None:
            module.__spec__ = self._own_spec


def give_plain_names(archive: ArchiveModules) -> None:
    """Let this process and its child processes import the archive's modules by their plain names.

    Only for a process that hosts this archive and no other, before any of its modules is loaded; it can't be
    undone. Idempotent.
    """
    if not archive.is_alone:
        archive.is_alone = True
        sys.meta_path.insert(0, _PlainNameFinder(archive))
        sys.path.append(archive.model_dir)  # multiprocessing passes it on to spawned processes
