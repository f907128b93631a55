"""Watches the operators that a model runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own have no types
    """Sees each operator that runs in a `with` block: a subclass defines `__torch_dispatch__`.

    Enter it in one thread; operators of other threads are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing `torch._dynamo` with the first operator: 2 s, again in each forked trial.

        A hook of torch's own classes. Models that call `torch.compile` run and are seen as before.
        """
        return False
