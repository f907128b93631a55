"""Import the Python code of an archive under private names.

Two archives in one process may both hold `model.py`, and an archive may hold a `json.py`. So nothing is put
on `sys.path`: the module `net` of version 1.0 of model `m` becomes `_torchere_archive.m._1_0_<digest>.net`,
and its own imports search the archive first. For this its modules get a `__builtins__` whose `__import__`
searches the archive; CPython takes `__import__` from there for every `import` statement.

`importlib.import_module` inside the archive does the same. Other code that looks modules up by name, such as
`pickle`, does not find the plain names of an archive. In a process that hosts a single archive, its modules
also have plain names, and use them as `__name__`: see `give_plain_names`.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import itertools
import linecache
import os
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torchere.handlers.context import Context
from torchere.handlers.moved import SecondNameLoader

ROOT = "_torchere_archive"
_PATH_AT_START = frozenset(map(os.path.realpath, sys.path))


class ArchiveModules:
    """The modules of one unpacked archive.

    Thread-safe as far as Python's import system is. Constructed by `open_archive`.
    """

    def __init__(self, prefix: str, model_dir: str) -> None:
        self.prefix = prefix
        self.model_dir = model_dir
        self.path = [model_dir]  # folders with its modules, in search order
        self.is_alone = False  # `give_plain_names` sets it: the process hosts no other archive
        self._owned: set[str] = set()
        self._importlib = _ArchiveImportlib(self)
        # One dict for all modules of the archive: the real builtins, except for `__import__`.
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}

    def search_first(self, folder: str) -> None:
        """Put the folder of a handler's file first in the search order, if the archive has that folder."""
        found = Path(self.model_dir, folder).resolve()
        if str(found) in self.path or not found.is_dir() or not found.is_relative_to(self.model_dir):
            return
        self.path.insert(0, str(found))
        forget_folder(str(found))  # a cached listing may be older
        if self.is_alone:
            sys.path.append(str(found))

    def load(self, name: str) -> ModuleType:
        """Import module `name` of the archive (dotted inside a package); the same object every time.

        Raises:
            ModuleNotFoundError: the archive has no such file; `error.name` is then the private name.
            Exception: raised by the module's own code.
        """
        return importlib.import_module(f"{self.prefix}.{name}")

    def owns(self, name: str) -> bool:
        """Return whether the archive itself holds a module or package of that top-level name.

        A folder that the archive's code has put first on `sys.path` goes before the archive's own.
        """
        # Only names that were found are cached: handlers unpack and write modules, too.
        if name in self._owned:
            return True
        if not self._look_up(name) or _is_in_folder_put_first(name, self.path):
            return False
        self._owned.add(name)
        return True

    def has_plain_name(self, name: str) -> bool:
        """Return whether a module of the archive, e.g. `net` or `parts.blocks`, has that name process-wide.

        False where the process hosts other archives, or where another module has the name.
        """
        return self.is_alone and not self._exists_elsewhere(name.partition(".")[0])

    def _look_up(self, name: str) -> bool:
        spec = PathFinder.find_spec(f"{self.prefix}.{name}", self.path)
        if spec is None:
            return False
        if spec.loader is not None and spec.origin is not None:
            return True
        # A bare directory, e.g. `data/`, is a package only if no other module has the name, as on sys.path.
        has_code = any(True for folder in self.path for _ in Path(folder, name).rglob("*.py"))
        return has_code and not self._exists_elsewhere(name)

    def _exists_elsewhere(self, name: str) -> bool:
        """Return whether the process can import a top-level module of that name from outside the archive."""
        if name in sys.modules:
            return sys.modules[name] is not sys.modules.get(f"{self.prefix}.{name}")
        for finder in tuple(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)  # finders of the old API have none
            if find_spec is None or getattr(finder, "archive", None) is self:  # searches this archive
                continue
            spec = find_spec(name, None)
            if spec is not None:
                return not self._holds(spec)
        return False

    def _holds(self, spec: ModuleSpec) -> bool:
        """Return whether a found module lies in the archive: handlers may put its folder on `sys.path`."""
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        return bool(places) and all(
            Path(place or "").resolve().is_relative_to(self.model_dir) for place in places
        )

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import like `__import__`, for the code of this archive; the parameters are that function's."""
        top = name.partition(".")[0]
        if level or not self.owns(top):
            module = builtins.__import__(name, globals, locals, fromlist or (), level)
            return self._importlib if module is importlib else module
        module = builtins.__import__(f"{self.prefix}.{name}", globals, locals, fromlist or (), 0)
        if self.is_alone and name not in sys.modules and self.has_plain_name(name):
            sys.modules[name] = sys.modules[f"{self.prefix}.{name}"]  # pickle looks it up there
        # `import a.b` binds `a`; with a prefix in front, `__import__` gave us the root package instead.
        return module if fromlist else sys.modules[f"{self.prefix}.{top}"]


def _is_in_folder_put_first(name: str, own: Sequence[str]) -> bool:
    """Return whether a folder that stands on `sys.path` before `own` and those of the start has it."""
    known = _PATH_AT_START.union(own)
    path = tuple(sys.path)  # other threads may change it
    folders = list(itertools.takewhile(lambda entry: os.path.realpath(entry) not in known, path))
    spec = PathFinder.find_spec(name, folders) if folders else None
    return spec is not None and spec.origin is not None


class _ArchiveImportlib(ModuleType):
    """The `importlib` that the code of an archive imports: the real one, except for `import_module`."""

    def __init__(self, archive: ArchiveModules) -> None:
        super().__init__("importlib", importlib.__doc__)
        self._archive = archive

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Import a module like `importlib.import_module`, but search the archive first."""
        if not name.startswith(".") and self._archive.owns(name.partition(".")[0]):
            return self._archive.load(name)
        return importlib.import_module(name, package)


class _ArchiveLoader(SourceFileLoader):
    """Loader that runs a source file with the builtins of its archive, and writes no `__pycache__`."""

    def __init__(self, fullname: str, path: str, archive: ArchiveModules) -> None:
        super().__init__(fullname, path)
        self._archive = archive

    def get_filename(self, name: str | None = None) -> str:
        """Return the path of the source file, whichever of the module's names is given.

        The inherited method refuses all names but `self.name`, and `exec_module` passes the plain one.
        """
        return super().get_filename(self.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._archive.builtins
        plain = self.name.removeprefix(f"{self._archive.prefix}.")
        if not self._archive.has_plain_name(plain):
            super().exec_module(module)
            return
        # Set before the code runs: classes, loggers and pickles take this name, also in child processes.
        module.__name__ = plain
        is_reload = plain in sys.modules
        sys.modules[plain] = module
        try:
            super().exec_module(module)
        except BaseException:
            if not is_reload:
                sys.modules.pop(plain, None)
            raise
        # Code may replace its own module in sys.modules, under the plain name, the only one it knows.
        sys.modules[self.name] = sys.modules.get(plain, module)

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write no bytecode: an archive's directory may be read-only, and is compared by digest."""


class _ArchiveFinder:
    """Meta-path finder for private names; it ignores all other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader sets the archive's builtins; for the parameters, see `importlib`."""
        archive = _by_prefix.get(".".join(fullname.split(".")[:3])) if fullname.startswith(ROOT) else None
        if archive is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and spec.origin is not None:
            spec.loader = _ArchiveLoader(fullname, spec.origin, archive)
        return spec


_archives: dict[str, ArchiveModules] = {}  # by folder
_by_prefix: dict[str, ArchiveModules] = {}
_lock = threading.Lock()  # guards both maps and the finder's registration; no archive code runs under it
_finder = _ArchiveFinder()


def open_archive(model: str, version: str, model_dir: str) -> ArchiveModules:
    """Return the modules of a version; the same object for every executor of it in this process.

    A version that is loaded again from another directory gets modules of its own. The old one keeps its
    modules while it still answers its remaining requests.
    """
    model_dir = str(Path(model_dir).resolve())
    with _lock:
        archive = _archives.get(model_dir)
        if archive is None:
            _drop_unpacked_no_more()
            archive = _archives[model_dir] = ArchiveModules(_free_prefix(model, version), model_dir)
            _by_prefix[archive.prefix] = archive
            _install(archive)
        return archive


def archive_of(context: Context) -> ArchiveModules:
    """Return the modules of the archive that the context belongs to."""
    model = (context.manifest or {}).get("model") or {}
    version = str(model.get("modelVersion", "1.0"))  # the manifest's default
    return open_archive(context.model_name, version, context.system_properties["model_dir"])


def archive_at(model_dir: str) -> ArchiveModules:
    """Return the modules of the archive unpacked in `model_dir`, for handlers without a context."""
    folder = Path(model_dir).resolve()
    with _lock:
        archive = _archives.get(str(folder))
    return archive or open_archive(folder.name, "", str(folder))


def forget_archive(model_dir: str) -> None:
    """Drop the modules of an archive that was unloaded; no effect when it has none.

    Running code keeps the objects it has; the next `open_archive` imports the modules again.
    """
    with _lock:
        archive = _archives.pop(str(Path(model_dir).resolve()), None)
        if archive is not None:
            _drop(archive)


def _drop_unpacked_no_more() -> None:
    """Drop the archives whose folder is gone. The caller holds `_lock`.

    Such an archive is opened by a thread that is still loading when its version is forgotten.
    """
    for model_dir in [one for one in _archives if not os.path.isdir(one)]:
        _drop(_archives.pop(model_dir))


def _free_prefix(model: str, version: str) -> str:
    names = itertools.count(2)
    prefix = plain = f"{ROOT}.{_safe(model)}.{_safe(version)}"
    while prefix in _by_prefix:
        prefix = f"{plain}_{next(names)}"
    return prefix


def _install(archive: ArchiveModules) -> None:
    """Register the finder and the parent packages of the archive's modules. The caller holds `_lock`."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    root, model, version = archive.prefix.split(".")
    sys.modules.setdefault(root, _package(root, []))
    sys.modules.setdefault(f"{root}.{model}", _package(f"{root}.{model}", []))
    sys.modules[f"{root}.{model}.{version}"] = _package(archive.prefix, archive.path)
    forget_folder(archive.model_dir)  # a cached listing may be older than the folder


def _package(name: str, path: list[str]) -> ModuleType:
    package = ModuleType(name, "Holds modules of an archive.")
    package.__path__ = path
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    return package


def _drop(archive: ArchiveModules) -> None:
    _by_prefix.pop(archive.prefix, None)
    for name in [n for n in tuple(sys.modules) if n == archive.prefix or n.startswith(archive.prefix + ".")]:
        del sys.modules[name]
    model = archive.prefix.rpartition(".")[0]
    if not any(prefix.startswith(f"{model}.") for prefix in _by_prefix):
        sys.modules.pop(model, None)
    forget_folder(archive.model_dir)


def _safe(name: str) -> str:
    """Return an identifier for a model or version name; distinct names stay distinct.

    Besides module names, TorchScript needs it: it parses the qualified names of the code it compiles.
    """
    if name.isascii() and name.isidentifier():
        return name
    safe = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{safe}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


# Plain names for the modules of the only archive in a process.
#
# Handlers that are written for a process of their own rely on names: a pickle in the archive refers to
# `model.Net`, a child process imports `model`. In a worker process that hosts a single archive, its
# modules can have those names. The names are tried last, after everything else that the process can
# import. They lead to the same modules that the archive's own imports use, so that each class exists
# once.


class _PlainNameFinder:
    """First finder in the meta path; it resolves only names that nothing else in the process has.

    A later finder would let the import system load the modules a second time, from the archive's folder on
    `sys.path` or from the `__path__` of its packages.
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
        return ModuleSpec(fullname, SecondNameLoader(private))


def give_plain_names(archive: ArchiveModules) -> None:
    """Let this process and its child processes import the archive's modules by their plain names.

    Only for a process that hosts this archive and no other, before any of its modules is loaded; it can't be
    undone. Idempotent.
    """
    if not archive.is_alone:
        archive.is_alone = True
        sys.meta_path.insert(0, _PlainNameFinder(archive))
        sys.path.append(archive.model_dir)  # multiprocessing passes it on to spawned processes


def forget_folder(folder: str) -> None:
    """Drop the cached listings of a folder and its subfolders, and their source lines for tracebacks.

    May be called from any thread. importlib.invalidate_caches() is not used: it iterates over a dictionary
    that imports in other threads change meanwhile, and then raises.
    """
    caches: tuple[MutableMapping[Any, Any], ...] = (sys.path_importer_cache, linecache.cache)
    for cache in caches:
        for place in tuple(cache):
            # The interactive prompt of Python 3.13.0 stores its input under a code object, not a path.
            if isinstance(place, str) and (place == folder or place.startswith(folder + os.sep)):
                cache.pop(place, None)
