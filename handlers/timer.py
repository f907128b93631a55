"""The decorator `timed`, which reports the wall time of a handler stage."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def timed(stage: F) -> F:
    """Decorate a handler's method so that its wall time is reported as a gauge.

    The metric is `ts_handler_<method>` in milliseconds, when the handler has a context with metrics and the
    archive's `model-config.yaml` sets `handler: {profile: true}`; otherwise the method just runs.
    """

    @functools.wraps(stage)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = _metrics_of(self)
        if metrics is None:
            return stage(self, *args, **kwargs)
        started = time.perf_counter()
        result = stage(self, *args, **kwargs)
        metrics.add_time(f"ts_handler_{stage.__name__}", (time.perf_counter() - started) * 1000)
        return result

    return wrapper  # type: ignore[return-value]  # wraps() keeps the signature, the checker can't see it


def _metrics_of(handler: Any) -> Any:
    context: Any = getattr(handler, "context", None)
    config = getattr(context, "model_yaml_config", None)
    if not isinstance(config, dict) or "handler" not in config:  # nearly always
        return None
    handler_config = config["handler"]
    is_wanted = isinstance(handler_config, dict) and handler_config.get("profile")
    return context.metrics if is_wanted else None
