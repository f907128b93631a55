"""Workflows, independent of the protocol: registers graphs of models, and runs them on the data plane.

Steps run as soon as their parents have answered, so branches run in parallel. Values go from step to step as
the bytes that the handlers made. The first step that fails ends the run: the others are withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from torchere.handlers.encode import indented_json, parse_json
from torchere.serving.config.kinds import shown_url
from torchere.serving.config.server_settings import SnapshotWorkflow
from torchere.serving.errors import (
    CutOff,
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    ModelNotFound,
    OutOfResources,
    ServingError,
    StepFailed,
    TooManyRequests,
    Unavailable,
    WorkflowNotFound,
)
from torchere.serving.frontend.budgets import BudgetExceeded, Budgets, ResultsBudget
from torchere.serving.frontend.call_scope import changed, manages
from torchere.serving.frontend.dataplane import STARTING, DataPlane, all_parts
from torchere.serving.frontend.refusals import FIRST_ERROR_STATUS, check_refusal
from torchere.serving.logs.access_lines import log_fields
from torchere.serving.logs.trace_context import trace_of_headers
from torchere.serving.registry.workflows import Workflow, Workflows
from torchere.serving.types import InferRequest, InferResponse, Parameter, StreamedResponse

logger = logging.getLogger(__name__)

# Failures after which another attempt may succeed.
_WORTH_RETRYING = (HandlerFailed, ExecutorDied, OutOfResources, DeadlineExceeded)
_LATER = (408, 425, 429)  # statuses of a handler that ask for another attempt
# Pauses between the attempts of a step; each is twice the one before. A crashed worker restarts in 0.1 s.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
_pause = asyncio.sleep
INLINE_BYTES = 65_536  # longer results of several leaves are joined in a thread: 12 MB of numbers take 0.3 s


class Page(NamedTuple):
    """One page of a list of models or of workflows: (name, url), sorted by name."""

    entries: Sequence[tuple[str, str]]
    next_page_token: str | None


def paged(known: Sequence[tuple[str, str]], limit: int, page_token: int) -> Page:
    """Return one page of at most `limit` entries, starting at `page_token` (both 0 or more).

    As in TorchServe, there is a token even when the page ends exactly at the last entry.
    """
    end = page_token + limit
    return Page(known[page_token:end], str(end) if end <= len(known) else None)


class WorkflowPlane:
    """Registers, lists and removes workflows, and answers requests to them.

    Used on the event loop, which it never blocks.

    Args:
        known: the registered workflows.
        dataplane: runs the steps.
        check_model_api: raises if models may not be registered over the network; workflows load models, too.
        max_step_bytes: limit on the result of a step that is sent in parts.
    """

    def __init__(
        self,
        known: Workflows,
        dataplane: DataPlane,
        check_model_api: Callable[[], None],
        max_step_bytes: int,
    ) -> None:
        self.known = known
        self._dataplane = dataplane
        self._max_step_bytes = max_step_bytes
        self.check_model_api = check_model_api

    async def register(self, wanted: SnapshotWorkflow) -> str:
        """Register a workflow, and return its name once all of its steps have loaded.

        Raises:
            NotAllowed: the model API is off.
            WorkflowNotFound, DownloadFailed, InvalidWorkflow, InvalidRequest, Conflict, WorkflowFailed: it is
                not registered.
        """
        manages(wanted.name or shown_url(wanted.url))
        self.check_model_api()
        name = (await self.known.register(wanted)).name
        manages(name)
        return name

    async def unregister(self, name: str) -> None:
        """Remove a workflow and its models after its requests are answered.

        Raises:
            NotAllowed: the model API is off.
            WorkflowNotFound: it is not registered.
            UnregisterTimeout: it is removed, and requests still run.
        """
        self.check_model_api()
        try:
            await self.known.unregister(name)
        except WorkflowNotFound:
            raise
        except BaseException:  # also if cancelled: it is removed before the wait for its requests
            changed()
            raise

    def list(self, limit: int, page_token: int) -> Page:
        """Return one page of at most `limit` workflows; see `paged`."""
        return paged([(each.name, each.url) for each in self.known.registered()], limit, page_token)

    def check_exists(self, name: str) -> None:
        """Raise `WorkflowNotFound` unless the workflow is registered, and `Unavailable` during start-up."""
        if not self._dataplane.has_started:
            raise Unavailable(STARTING)
        self.known.find(name)

    async def infer(self, name: str, request: InferRequest, budgets: Budgets | None = None) -> InferResponse:
        """Run a workflow for one request. Cancelling the awaiting task withdraws its steps.

        `request.deadline_s` bounds the whole run, and the `timeout-ms` of a step bounds each of its attempts.
        Results count in `budgets` until the steps that read them have finished.

        Raises:
            WorkflowNotFound: it is not registered.
            Unavailable: the server is starting, a step can't be admitted now, or `budgets` have no room.
            DeadlineExceeded: the deadline of the request passed.
            TooManyRequests: its client has too many unanswered predictions; each step counts as one.
            StepFailed: a step failed in each of its attempts.
            HandlerFailed: the handler of a step refused its input.
        """
        self.check_exists(name)
        workflow = self.known.find(name)
        workflow.begin()
        held = ResultsBudget(budgets or Budgets())
        try:
            return await self._run(workflow, request, held)
        finally:
            held.give(held.held_bytes)
            workflow.end()

    async def _run(self, workflow: Workflow, request: InferRequest, held: ResultsBudget) -> InferResponse:
        spec = workflow.spec
        running: dict[str, asyncio.Task[None]] = {}
        results: dict[str, InferResponse] = {}  # of leaves, and of steps with unfinished children
        children_left = {name: len(spec.children.get(name, ())) for name in spec.steps}

        async def step(name: str) -> None:
            parents, asked = spec.parents[name], request
            for parent in parents:
                await running[parent]
            if parents:
                names = parents if len(parents) > 1 else ("body",)
                values = [
                    Parameter(each, results[parent].body) for each, parent in zip(names, parents, strict=True)
                ]
                asked = msgspec.structs.replace(request, parameters=tuple(values))
                del values
            result = await self._attempts(workflow, name, asked)
            _hold(name, result, held)
            results[name] = result
            for parent in parents:
                children_left[parent] -= 1
                if not children_left[parent]:
                    held.give(len(results.pop(parent).body))

        for name in spec.steps:  # parents first
            running[name] = asyncio.ensure_future(step(name))
        try:
            await asyncio.gather(*running.values())
        except BaseException:  # cancelled, too
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
            raise
        leaves = {name: results[name] for name in spec.leaves}
        if len(leaves) == 1 or sum(len(leaf.body) for leaf in leaves.values()) <= INLINE_BYTES:
            return _answer(leaves)
        return await asyncio.to_thread(_answer, leaves)

    async def _attempts(self, workflow: Workflow, step: str, request: InferRequest) -> InferResponse:
        """Run one step; after a failure and a pause repeat it, as often as its settings allow."""
        settings = workflow.spec.steps[step]
        attempts_left, pause_s = settings.retry_attempts, FIRST_PAUSE_S
        while True:
            deadline_s = min(request.deadline_s, time.monotonic() + settings.timeout_ms / 1000)
            attempt = msgspec.structs.replace(request, deadline_s=deadline_s)
            try:
                response = await self._dataplane.infer(workflow.model_of(step), None, attempt)
                if isinstance(response, StreamedResponse):
                    body, head = (
                        b"".join(await all_parts(response.chunks, self._max_step_bytes)),
                        response.head,
                    )
                    response = InferResponse(body, head.headers, head.status, head.reason)
            except TooManyRequests:  # the client has reached its limits; no step has failed
                raise
            except ServingError as err:
                if time.monotonic() >= request.deadline_s:
                    raise DeadlineExceeded(f"The deadline passed at the step {step}.") from err
                if not attempts_left or not _is_worth_retrying(err):
                    raise _step_error(workflow, step, err, request) from err
            else:
                _check(step, response)
                return response
            attempts_left -= 1
            await _pause(min(pause_s, max(0.0, request.deadline_s - time.monotonic())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _hold(step: str, response: InferResponse, held: ResultsBudget) -> None:
    """Count the bytes of a step's result; raise `Unavailable` if there is no room for them."""
    try:
        held.take(len(response.body))
    except BudgetExceeded as err:
        raise Unavailable(f"Error executing {step}: {err}") from None


def _check(step: str, response: InferResponse) -> None:
    """Raise the error of the whole run if a built-in handler refused its input: no step can use that body."""
    try:
        check_refusal(response)
    except HandlerFailed as refusal:
        raise HandlerFailed(f"Error executing {step}: {refusal.message}", refusal.status) from None


def _is_refusal(error: ServingError) -> TypeGuard[HandlerFailed]:
    """Tell whether a handler raised an error with a client error status (4xx)."""
    return isinstance(error, HandlerFailed) and FIRST_ERROR_STATUS <= error.status < 500


def _is_worth_retrying(error: ServingError) -> bool:
    """Return whether a step may succeed later; a handler that refuses an input would do so again."""
    if _is_refusal(error):
        return error.status in _LATER
    return isinstance(error, _WORTH_RETRYING)


def _step_error(workflow: Workflow, step: str, error: ServingError, request: InferRequest) -> ServingError:
    """Return the error of the whole run; for a failed step it has TorchServe's text."""
    text = f"Error executing {step}"
    if _is_refusal(error):
        return HandlerFailed(f"{text}: {error.message}", error.status, error.detail)
    cause = ": ".join(filter(None, (error.message, error.detail)))
    if isinstance(error, Unavailable):
        kind = CutOff if isinstance(error, CutOff) else Unavailable  # after `CutOff` the step may have run
        refused = kind(f"{text}: {error.message}", error.detail)
        refused.retry_after_s = error.retry_after_s
        return refused
    if isinstance(error, ModelNotFound):
        cause = f"the model {workflow.model_of(step)} was unregistered"
    extra = log_fields(request.request_id, trace_of_headers(request.headers))
    logger.warning("workflow %s: step %s failed: %s", workflow.name, step, cause, extra=extra)
    return StepFailed(text, cause)


def _answer(leaves: Mapping[str, InferResponse]) -> InferResponse:
    """Return the response of the workflow: its leaf's response, or an object with a member for each leaf."""
    if len(leaves) == 1:
        (leaf,) = leaves.values()
        return leaf
    members = {name: _member(name, leaf) for name, leaf in leaves.items()}
    return InferResponse(indented_json(members) + b"\n")


def _member(name: str, leaf: InferResponse) -> Any:
    """Return a leaf's result as JSON: its value if it is JSON, else its text."""
    try:
        text = bytes(leaf.body).decode()
    except UnicodeDecodeError as err:
        raise StepFailed(f"Error executing {name}", "its result is neither JSON nor text") from err
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return text
