"""A handler that imports a large library, as handlers for transformers do, and answers without it."""

from __future__ import annotations

from typing import Any

import transformers.pipelines

from torchere.handlers import BaseHandler


class Handler(BaseHandler):
    """Answers each request with the number of the library's pipelines."""

    def initialize(self, context: Any) -> None:
        """Load nothing."""
        self.tasks = len(transformers.pipelines.SUPPORTED_TASKS)
        self.initialized = True

    def handle(self, data: Any, context: Any) -> list[str]:
        """Return an answer for each request."""
        return [f"{self.tasks} pipelines"] * len(data)
