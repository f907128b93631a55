"""Find the module that a manifest's handler string names, and the entry point in it.

A handler is a file of the archive (`my_handler.py`, `my_handler:function`) or the name of a built-in handler.
Nothing else is imported, so a manifest can't reach modules of the process (`os:system`) or of other folders.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torchere.handlers.archive_import import ArchiveModules, archive_at, archive_of
from torchere.handlers.built_in import BUILT_IN_HANDLERS, ENVELOPES, HOMES, NOT_SHIPPED, OF_TOOLKITS
from torchere.handlers.context import Context
from torchere.handlers.cpp import CppHandlerName, cpp_handler_name
from torchere.handlers.errors import HandlerLoadError
from torchere.handlers.ts_compat import alias as ts_alias

Call = Callable[[Any, Context], Any]


class EntryPoint:
    """A loaded and initialised handler. Used by one executor at a time.

    Args:
        call: takes (data, context) and returns the answers, or a coroutine for them.
        instance: the handler object behind it, None for the function form.
        enveloped: an envelope wraps the handler, so example rows of the handler do not fit.
        beside: like `call`, for batches that run concurrently; None: `call` itself.
        loop: the event loop of the handler's coroutines; None: one is made when it is needed.
    """

    def __init__(
        self,
        call: Call,
        instance: Any = None,
        enveloped: bool = False,
        *,
        beside: Call | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._call = call
        self._beside = beside or call
        self._loop = loop
        self.instance = instance
        self.enveloped = enveloped

    def __call__(self, data: list[Any] | None, context: Context) -> object:
        """Run one batch and return the answers; exceptions of the handler propagate."""
        answers = self._call(data, context)
        return self.loop.run_until_complete(answers) if inspect.iscoroutine(answers) else answers

    def begin(self, data: list[Any], context: Context) -> object:
        """Call the handler; return its answers, or a coroutine for them, to be run on `loop`."""
        return self._beside(data, context)

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return example rows for the first runs, in the form of `data`; None when the handler has none.

        The rows of a built-in handler are not used for an archive's subclass, which may take other input
        (e.g. a grey digit). None while runs are profiled, because each run would write a trace.
        """
        example = getattr(self.instance, "warmup_data", None)
        if example is None or self.enveloped or os.environ.get("ENABLE_TORCH_PROFILER"):
            return None
        return None if _inherits_examples(type(self.instance)) else example()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop for all coroutines of the handler: clients that it makes are bound to the loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop


def _inherits_examples(handler_class: type) -> bool:
    """Return whether an archive's class inherits `warmup_data` from a built-in handler."""
    owner = next((base for base in handler_class.__mro__ if "warmup_data" in vars(base)), handler_class)
    ours = "torchere.handlers."
    return owner.__module__.startswith(ours) and not handler_class.__module__.startswith(ours)


def entry_of(module: ModuleType, function: str, context: Context) -> EntryPoint:
    """Return the initialised handler of a module: its function of that name, else its only class.

    Raises:
        HandlerLoadError: it has neither, or one that is not a handler.
        Exception: raised by the handler's own initialisation.
    """
    entry = getattr(module, function, None)
    if entry is None:
        return initialised(_only_class(module, function), module, context)
    if not callable(entry):
        raise HandlerLoadError(f"{function!r} in {module.__file__} is not callable; make it a function")
    if inspect.isclass(entry):
        raise HandlerLoadError(
            f"{function!r} in {module.__file__} is a class, and the name behind the colon is a function's; "
            f"leave ':{function}' out of --handler: the only class of a file is found without it"
        )
    _check_takes(entry, (None, context), f"the function {function!r} in {module.__file__}", "(data, context)")
    entry_point = EntryPoint(entry)
    try:
        entry_point(None, context)  # the contract: called once without data, to load
    except (TypeError, AttributeError) as err:
        if "NoneType" not in str(err):
            raise
        raise HandlerLoadError(
            f"the function {function!r} in {module.__file__} failed when it was called with data=None, as "
            f"TorchServe does once to load it: {err}; return before data is used if it is None"
        ) from err
    return entry_point


def _only_class(module: ModuleType, function: str) -> type:
    classes = list_classes_from_module(module)
    file = module.__file__
    if len(classes) != 1:
        found = ", ".join(item.__name__ for item in classes) or "none"
        cure = "move the others to a file beside it" if classes else "define either in it"
        raise HandlerLoadError(
            "Expected only one class in custom service code or a function entry point "
            f"[found: {found}]: {file} has no function {function!r}, so it must define exactly one class; "
            f"{cure}"
        )
    for method in ("handle", "initialize"):
        if not callable(getattr(classes[0], method, None)):
            raise HandlerLoadError(
                f"the class {classes[0].__name__} in {file} has no method {method!r}; a handler needs "
                "initialize(context) and handle(data, context), or derive it from BaseHandler"
            )
    return classes[0]


def initialised(handler_class: type, module: ModuleType, context: Context) -> EntryPoint:
    """Construct a handler class, call its `initialize`, and return its entry point; `module` is its module.

    Raises:
        HandlerLoadError: it can't be constructed without arguments.
        Exception: raised by its `initialize`.
    """
    try:
        instance: Any = handler_class()
    except TypeError as err:
        raise HandlerLoadError(
            f"the class {handler_class.__name__} in {module.__file__} can't be constructed without "
            f"arguments: {err}"
        ) from err
    name = f"the class {handler_class.__name__} in {module.__file__}"
    _check_takes(instance.initialize, (context,), f"beside self, 'initialize' of {name}", "(context)")
    instance.initialize(context)
    _check_takes(instance.handle, (None, context), f"beside self, 'handle' of {name}", "(data, context)")

    def call(data: Any, ctx: Context) -> Any:
        # Looked up at each call: handlers may replace their own `handle`, as MicroBatching's users do.
        return instance.handle(data, ctx)

    return EntryPoint(call, instance)


def _check_takes(call: Call, given: tuple[object, ...], name: str, expected: str) -> None:
    """Raise HandlerLoadError if a function of a handler does not take that many arguments."""
    try:
        signature = inspect.signature(call, follow_wrapped=False)  # decorators may drop or add arguments
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*given)
    except TypeError as err:
        raise HandlerLoadError(f"{name} takes {signature}; expected {expected}: declare it so") from err


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes the module itself defines, by name; only subclasses of `parent_class` if given."""
    defined = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
    ]
    return [item for item in defined if parent_class is None or issubclass(item, parent_class)]


_MODULE = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")  # also names that no statement can import: `llama-handler.py`


def load_entry_point(
    handler: str,
    context: Context,
    *,
    envelope: str | None = None,
    installed: bool = False,
    runtime: str = "python",
) -> EntryPoint:
    """Import, construct and initialise the handler of an archive.

    Args:
        handler: as in the manifest: `file.py`, `file`, `file:function`, or a built-in name; for the runtime
            LSP also `library:Class`.
        context: its `model_dir` is where the archive is unpacked.
        envelope: name of a request envelope (`ENVELOPES`), None for none. A handler whose class sets
            `reads_envelopes = True` reads these formats itself, and gets requests as they are.
        installed: the name comes from the operator, not from an archive, so it may also mean a module that is
            installed (`package.module:function`), or a file anywhere (`/folder/file.py:function`).
        runtime: as in the manifest: LSP for handlers in C++.

    Raises:
        HandlerLoadError: there is no such handler, its file can't be imported, or it is not a handler. The
            text names the file, the cause and the remedy; `__cause__` is the archive's own exception, if
            there is one.
        Exception: raised by the handler's own initialisation.
    """
    in_cpp = None if installed else cpp_handler_name(handler, runtime)
    entry_point = _in_cpp(in_cpp, context) if in_cpp else _in_python(handler, context, installed)
    if envelope and not getattr(entry_point.instance, "reads_envelopes", False):
        return _enveloped(_envelope(envelope)(entry_point.begin), entry_point)
    return entry_point


def _enveloped(wrapped: Any, inner: EntryPoint) -> EntryPoint:
    return EntryPoint(
        wrapped.handle,
        inner.instance,
        enveloped=True,
        beside=lambda data, context: copy.copy(wrapped).handle(data, context),
        loop=inner._loop,  # clients that the handler made while it was loaded are bound to it
    )


def _in_cpp(name: CppHandlerName, context: Context) -> EntryPoint:
    from torchere.handlers.cpp.handler import CppHandler  # noqa: PLC0415  # it imports torch

    instance = CppHandler(name)
    instance.initialize(context)
    return EntryPoint(instance.handle, instance)


def _in_python(handler: str, context: Context, installed: bool) -> EntryPoint:
    found = _found(handler, archive_of(context), installed)
    if isinstance(found, type):
        return initialised(found, sys.modules[found.__module__], context)
    return entry_of(found, _split(handler)[1], context)


def class_of(handler: str, model_dir: str | None) -> type | None:
    """Return the class of a handler without constructing it; None if the handler is a function.

    Args:
        handler: as in the manifest.
        model_dir: the folder with the handler's file; None for a built-in handler.

    Raises:
        HandlerLoadError: there is no such handler, its file can't be imported, or has no class or several.
    """
    found = _found(handler, archive_at(model_dir) if model_dir else None)
    function = _split(handler)[1]
    if isinstance(found, type):
        return found
    return None if hasattr(found, function) else _only_class(found, function)


def _found(handler: str, archive: ArchiveModules | None, installed: bool = False) -> ModuleType | type:
    """Return the module of the handler's file, or the class of a built-in handler."""
    file, _ = _split(handler)
    if installed and file.startswith("/") and file.endswith(".py"):
        ts_alias.install()
        return _outside(Path(file))
    module_name = _module_name(handler)
    if archive and (held := _held(archive, handler, module_name)):
        ts_alias.install()
        return _import_file(archive, held)
    name = module_name.removeprefix("ts.torch_handler.")
    if installed and name not in BUILT_IN_HANDLERS and name not in OF_TOOLKITS:
        ts_alias.install()
        return _installed(module_name)
    return _built_in(name, handler, module_name, archive.model_dir if archive else "the archive")


def _held(archive: ArchiveModules, handler: str, module_name: str) -> str | None:
    """Return the name of the handler's module in the archive; None if the archive holds no such module.

    As in TorchServe, the folder of the handler's file is searched first, because the file may import its
    neighbours. The folder may have the name of another module (`code`), or be missing, as in old manifests.
    """
    folder, _, _ = _split(handler)[0].rpartition("/")
    if folder:
        archive.search_first(folder)
    stem = module_name.rpartition(".")[2]
    return next((name for name in (module_name, stem) if archive.owns(name.partition(".")[0])), None)


def _module_name(handler: str) -> str:
    path = _split(handler)[0].removeprefix("./").removesuffix(".py").replace("/", ".")
    if not _MODULE.fullmatch(path):
        raise HandlerLoadError(
            f"the handler {handler!r} can't be used: expected a Python file of the archive, such as "
            f"'my_handler.py' or 'my_handler:function', or one of {_known(BUILT_IN_HANDLERS)}; paths that "
            "leave the archive are refused"
        )
    return path


def _split(handler: str) -> tuple[str, str]:
    """Return the file, which ends at the first colon, and the function after it."""
    file, _, function = handler.strip().partition(":")
    return file, function or "handle"


def _import_file(archive: ArchiveModules, module_name: str) -> ModuleType:
    try:
        return archive.load(module_name)
    except ImportError as err:
        raise HandlerLoadError(_import_failure(archive, module_name, err)) from err
    except SyntaxError as err:
        raise HandlerLoadError(
            f"the handler file {err.filename} is not valid Python: {err.msg} in line {err.lineno}; "
            "correct it and make the archive again"
        ) from err


def _import_failure(archive: ArchiveModules, module_name: str, err: ImportError) -> str:
    if isinstance(err, ModuleNotFoundError) and err.name == f"{archive.prefix}.{module_name}":
        file = f"{module_name.replace('.', '/')}.py"
        return f"the archive holds no handler file {file}; add it with --handler and make the archive again"
    file = _file_of(archive, module_name)
    text = str(err).replace(f"{archive.prefix}.", "")
    if isinstance(err, ModuleNotFoundError):
        missing = (err.name or "").replace(f"{archive.prefix}.", "")
        return (
            f"the handler file {file} was found, but its code imports {missing!r}, which is not there "
            f"({text}); add the file with --extra-files, or install the package in the server's environment "
            "(the archive's requirements are installed with install_py_dep_per_model=true only)"
        )
    what = "an import in its code failed" if file.endswith(".py") else "it can't be imported"
    return f"the handler file {file} was found, but {what}: {text}"


def _file_of(archive: ArchiveModules, module_name: str) -> str:
    """Return the last file in the archive that the dotted name of a module leads to.

    The search ends at a name that is missing, or is not a package.
    """
    found, folders = f"{module_name.replace('.', '/')}.py", [archive.model_dir]
    for part in module_name.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            break
        if spec.origin is not None:
            found = Path(spec.origin).relative_to(archive.model_dir).as_posix()
        folders = list(spec.submodule_search_locations or ())
    return found


def _installed(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ImportError as err:
        raise HandlerLoadError(
            f"the handler's module {module_name!r} can't be imported: {err}; install its package in this "
            "environment, or correct the handler's name (of a server: default_service_handler)"
        ) from err


def _built_in(name: str, handler: str, module_name: str, model_dir: str) -> type:
    if name in NOT_SHIPPED:
        raise HandlerLoadError(
            f"the handler {name!r} is not built in here: {NOT_SHIPPED[name]}; put a handler file of your own "
            "into the archive"
        )
    home = HOMES.get(name)
    if home is None:
        raise HandlerLoadError(
            f"the handler {handler!r} is neither a file of the archive ({model_dir} holds no "
            f"{module_name}.py) nor one of {_known(BUILT_IN_HANDLERS)}; check the spelling of --handler"
        )
    module, class_name = home.split(":")
    found: type = getattr(importlib.import_module(module), class_name)
    return found


def _outside(file: Path) -> ModuleType:
    """Import a module from a file outside any archive; as in TorchServe it may import files next to it."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None  # both exist for a name that ends in .py
    module = importlib.util.module_from_spec(spec)
    is_first = sys.modules.setdefault(file.stem, module) is module  # where pickle and dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except BaseException as err:
        if is_first:
            sys.modules.pop(file.stem, None)  # it is only partly initialised
        if not isinstance(err, (ImportError, OSError)):
            raise
        raise HandlerLoadError(
            f"the default handler's file {file} can't be imported: {err}; install what it needs, or correct "
            "default_service_handler"
        ) from err
    return module


def _known(table: dict[str, str]) -> str:
    return ", ".join(sorted(table))


def _envelope(name: str) -> Any:
    if name not in ENVELOPES:
        raise HandlerLoadError(
            f"the service envelope {name!r} does not exist; expected one of {_known(ENVELOPES)}"
        )
    module, class_name = ENVELOPES[name].split(":")
    return getattr(importlib.import_module(module), class_name)
