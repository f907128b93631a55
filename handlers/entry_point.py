"""The entry point that is called with each batch: a handler's function or object, initialised."""

from __future__ import annotations

import asyncio
import inspect
import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchere.handlers.context import Context
from torchere.handlers.errors import HandlerLoadError

Call = Callable[[Any, Context], Any]


class EntryPoint:
    """A loaded and initialised handler. Used by one executor at a time.

    Args:
        call: takes (data, context) and returns the answers, or a coroutine for them.
        instance: the handler object behind it, None for the function form.
        enveloped: an envelope wraps the handler, so example rows of the handler do not fit.
    """

    def __init__(self, call: Call, instance: Any = None, enveloped: bool = False) -> None:
        self._call = call
        self._loop: asyncio.AbstractEventLoop | None = None
        self.instance = instance
        self.enveloped = enveloped

    def __call__(self, data: list[Any] | None, context: Context) -> object:
        """Run one batch and return the answers; exceptions of the handler propagate."""
        answers = self._call(data, context)
        return self._wait_for(answers) if inspect.iscoroutine(answers) else answers

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return example rows for the first runs, in the form of `data`; None when the handler has none.

        Those of a built-in handler are not used for a subclass of it, which may take other input (e.g. a grey
        digit). There are none while runs are profiled: each would write a trace.
        """
        example = getattr(self.instance, "warmup_data", None)
        if example is None or self.enveloped or os.environ.get("ENABLE_TORCH_PROFILER"):
            return None
        return None if _is_inherited_from_us(type(self.instance), "warmup_data") else example()

    def _wait_for(self, answers: Any) -> object:
        # One loop for the life of the handler: asynchronous clients that it keeps are bound to their loop.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(answers)


def _is_inherited_from_us(handler_class: type, method: str) -> bool:
    owner = next((base for base in handler_class.__mro__ if method in vars(base)), handler_class)
    return owner is not handler_class and owner.__module__.rpartition(".")[0] == __package__


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
    """Construct a handler class, call its `initialize`, and return it; `module` is the class's module.

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
    instance.initialize(context)

    def call(data: Any, ctx: Context) -> Any:
        # Looked up at each call: handlers may replace their own `handle`, as MicroBatching's users do.
        return instance.handle(data, ctx)

    return EntryPoint(call, instance)


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes the module itself defines, by name; only subclasses of `parent_class` if given."""
    defined = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
    ]
    return [item for item in defined if parent_class is None or issubclass(item, parent_class)]
