"""The handler of `ranks.py`: each request is a JSON list of numbers of words."""

import torch

from torchere.handlers.base import BaseHandler


class WordsHandler(BaseHandler):
    """Makes one batch of the lists, which have one length."""

    def preprocess(self, data: list[dict[str, list[int]]]) -> torch.Tensor:
        """Return the numbers of words, one row a request."""
        return torch.tensor([row["body"] for row in data])
