"""Watches the operators that a model runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own have no types
    """Sees each operator that runs in a `with` block: a subclass defines `__torch_dispatch__`.

    Enter it in one thread; operators of other threads are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Skip torch's `__init_subclass__`, whose wrapper imports `torch._dynamo` at the first operator.

        The import takes 2 s, and again in each forked trial. Models that call `torch.compile` are seen
        without the wrapper, too.
        """
