"""The specification of a workflow: models, functions, and the graph that connects them. Pure.

The format is TorchServe's: a YAML file with `models`, which holds defaults and a URL for each model, and
`dag`, which lists the children of each node. A node of the graph without an entry in `models` is a function
of the workflow's handler.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torchere.archiver.request import MODEL_NAME_PATTERN
from torchere.serving.config.bounded_yaml import read_yaml
from torchere.serving.config.kinds import near
from torchere.serving.config.server_settings import MAX_BATCH_SIZE, MAX_EXECUTORS
from torchere.serving.errors import InvalidGraph, InvalidWorkflow

MAX_STEPS = 100  # of one workflow: each is a model, with a worker process for most handlers
MAX_RETRIES = 100
MAX_DELAY_MS = 86_400_000  # one day, for delays and time-outs
_MOST_IGNORED = 10  # unknown settings that are named

_PARSE_FAILED = "Failed to parse yaml."  # TorchServe's text
_ONE_START = "DAG should have only one start node"
_NO_DAG = "Not a valid DAG"
_LOOP = "loop exception"

# In CPython 3.11 `ast.parse` in two threads may raise SystemError (github.com/python/cpython/issues/106905).
_parsing = threading.Lock()


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one step, or the defaults of all; the values here are TorchServe's defaults.

    `retry_attempts` is the number of further attempts after a failed one, and `timeout_ms` bounds each.
    """

    url: str | None = None  # None: the step is a function of the workflow's handler
    min_workers: int = 1
    max_workers: int = 1
    batch_size: int = 1
    max_batch_delay_ms: int = 50
    retry_attempts: int = 1
    timeout_ms: int = 10_000


_MEMBERS = {  # key in the file: field, minimum, maximum
    "min-workers": ("min_workers", 0, MAX_EXECUTORS),
    "max-workers": ("max_workers", 1, MAX_EXECUTORS),
    "batch-size": ("batch_size", 1, MAX_BATCH_SIZE),
    "max-batch-delay": ("max_batch_delay_ms", 0, MAX_DELAY_MS),
    "retry-attempts": ("retry_attempts", 0, MAX_RETRIES),
    "timeout-ms": ("timeout_ms", 1, MAX_DELAY_MS),
}


@dataclass(frozen=True, slots=True)
class WorkflowSpec:
    """A valid workflow: a graph without cycles, with one start node.

    Attributes:
        defaults: the settings that a step inherits.
        steps: the settings of each step, by its name; parents come before their children.
        children: the graph as written.
        parents: the steps that each step gets its input from, in the order of the graph.
        unused: models of the file that the graph does not contain.
        ignored: the first unknown settings of models, each with its model and the most similar known setting.
    """

    defaults: StepSettings
    steps: Mapping[str, StepSettings]
    children: Mapping[str, tuple[str, ...]]
    parents: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the steps that are functions of the workflow's handler."""
        return tuple(name for name, step in self.steps.items() if step.url is None)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the steps without children, whose results are the response."""
        return tuple(name for name in self.steps if not self.children.get(name))


def read_workflow_spec(text: str) -> WorkflowSpec:
    """Parse a specification.

    Raises:
        InvalidWorkflow: it is not YAML, a member is missing or invalid, or one outside a model is unknown.
        InvalidGraph: the graph has a cycle or several start nodes, or names a node twice.
    """
    try:
        document = read_yaml(text)
    except ValueError as err:
        raise InvalidWorkflow(_PARSE_FAILED, str(err)) from err
    if not isinstance(document, dict):
        raise InvalidWorkflow(_PARSE_FAILED, "expected a mapping with 'models' and 'dag'")
    models = _mapping(document, "models", {})
    children = _children(_mapping(document, "dag"))
    defaults, own = _settings(models)
    ignored = _unknown(models, own)
    parents = _parents(children)
    order = _sorted(parents)
    lacking = [name for name, step in own.items() if step.url is None]
    if lacking:
        text = f"The model {lacking[0]!r} has no url; expected the name of its archive."
        raise InvalidWorkflow(text, f"unknown settings: {', '.join(ignored)}" if ignored else "")
    # As in TorchServe, the defaults for workers and batches apply to models only.
    function = replace(defaults, min_workers=1, max_workers=1, batch_size=1, max_batch_delay_ms=0)
    steps = {name: own.get(name, function) for name in order}
    unused = tuple(sorted(own.keys() - steps.keys()))
    return WorkflowSpec(defaults, steps, children, parents, unused, ignored)


def check_functions(spec: WorkflowSpec, handler: str | None, source: str) -> None:
    """Check that the handler defines each function of the graph.

    Args:
        spec: the specification.
        handler: name of the workflow's handler file; None: the workflow has none.
        source: the handler's text.

    Raises:
        InvalidWorkflow: a node is neither a model nor a function, or the handler is not valid Python.
    """
    if not spec.functions:
        return
    if handler is None:
        raise InvalidWorkflow(
            f"The node {spec.functions[0]!r} is not in 'models', and the workflow has no handler.",
            "expected a model with its url, or a handler with a function of that name",
        )
    names = _module_names(handler, source)
    for name in spec.functions:
        if names is not None and name not in names:
            raise InvalidWorkflow(
                f"The node {name!r} is neither in 'models' nor a function of {handler}.",
                f"{handler} defines: {', '.join(sorted(names)) or 'no function'}",
            )


def _module_names(handler: str, source: str) -> Collection[str] | None:
    """Return the names that a module defines, without running it; None if they can't be known."""
    try:
        with _parsing:
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise InvalidWorkflow(f"The handler {handler} is not valid Python.", str(err)) from err
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif not isinstance(statement, (ast.Expr, ast.ClassDef, ast.Import)):
            return None  # a branch or a loop may define more
    return None if "*" in names else names


def _mapping(document: Mapping[Any, Any], name: str, default: Mapping[Any, Any] | None = None) -> Any:
    value = document.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, dict) or not value:
        found = "it is missing" if value is None else f"found {value!r:.60}"
        raise InvalidWorkflow(f"The specification needs a mapping called {name!r}: {found}.")
    return value


def _settings(models: Mapping[Any, Any]) -> tuple[StepSettings, dict[str, StepSettings]]:
    """Return the defaults, and the settings of each model."""
    shared = {key: value for key, value in models.items() if key in _MEMBERS}
    defaults = _with(StepSettings(), shared, "models")
    own: dict[str, StepSettings] = {}
    for name, entry in models.items():
        if name in _MEMBERS:
            continue
        if not isinstance(name, str) or not isinstance(entry, dict):
            known = ", ".join(_MEMBERS)
            raise InvalidWorkflow(
                f"{name!r:.60} in 'models' is neither a setting nor a model with a url.",
                f"settings are {known}; a model is a mapping",
            )
        own[name] = _with(defaults, entry, f"the model {name!r}")
    return defaults, own


def _with(base: StepSettings, entry: Mapping[Any, Any], place: str) -> StepSettings:
    changes: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "url":
            if not isinstance(value, str) or not value:
                raise InvalidWorkflow(f"url of {place} is {value!r:.60}; expected the name of an archive.")
            changes["url"] = value
        elif key in _MEMBERS:
            field, least, most = _MEMBERS[key]
            if type(value) is not int or not least <= value <= most:
                raise InvalidWorkflow(
                    f"{key} of {place} is {value!r:.60}; expected a whole number from {least} to {most}."
                )
            changes[field] = value
    return replace(base, **changes)


def _unknown(models: Mapping[Any, Any], own: Collection[str]) -> tuple[str, ...]:
    """Return the settings of models that are unknown; TorchServe does not look at them."""
    known = ("url", *_MEMBERS)
    unknown = [(key, name) for name in own for key in models[name] if key not in known]
    told = []
    for key, name in unknown[:_MOST_IGNORED]:
        hint = near(str(key)[:60], known)
        told.append(f"{key!r:.60} of the model {name!r:.60}" + (f" ({hint})" if hint else ""))
    if len(unknown) > _MOST_IGNORED:
        told.append(f"and {len(unknown) - _MOST_IGNORED} more")
    return tuple(told)


def _children(dag: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    children: dict[str, tuple[str, ...]] = {}
    for name, listed in dag.items():
        entries = [] if listed is None else listed
        if not isinstance(entries, list) or not all(isinstance(each, str) for each in [name, *entries]):
            raise InvalidWorkflow(
                f"{name!r:.60} in 'dag' has the children {listed!r:.60}; expected a list of node names."
            )
        if len(set(entries)) < len(entries):
            raise InvalidGraph(_LOOP, f"{name} lists a child twice: {', '.join(entries)}")
        children[name] = tuple(entries)
    return children


def _parents(children: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    parents: dict[str, list[str]] = {name: [] for name in children}
    for name, below in children.items():
        for child in below:
            parents.setdefault(child, []).append(name)
    if len(parents) > MAX_STEPS:
        raise InvalidWorkflow(f"The graph has {len(parents)} nodes; expected at most {MAX_STEPS}.")
    for name in parents:
        if not name or not MODEL_NAME_PATTERN.fullmatch(f"workflow__{name}"):
            raise InvalidWorkflow(
                f"The node {name!r:.60} in 'dag' contains special characters.",
                "expected letters, digits, '_', '-' or '.': it is the end of a model's name",
            )
    return {name: tuple(above) for name, above in parents.items()}


def _sorted(parents: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the nodes with parents before children; refuse a graph without exactly one start node."""
    starts = [name for name, above in parents.items() if not above]
    if len(starts) > 1:
        raise InvalidGraph(_ONE_START, f"found {len(starts)}: {', '.join(starts)}")
    try:
        order = list(TopologicalSorter(parents).static_order())
    except CycleError as err:
        cycle = " -> ".join(reversed(err.args[1]))
        raise InvalidGraph(_NO_DAG if starts else _ONE_START, f"the graph has a cycle: {cycle}") from err
    return order
