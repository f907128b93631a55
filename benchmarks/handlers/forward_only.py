"""Runs `forward` on the same 32 rows for every request, so that the model is what is timed."""

import torch
from ts.torch_handler.base_handler import BaseHandler

ROWS, WIDTH = 32, 1024


class ForwardOnlyHandler(BaseHandler):
    """Answers the number of rows it ran. For batch size 1."""

    def initialize(self, context):
        """One intra-op thread, however many cores the server would give a single executor."""
        super().initialize(context)
        torch.set_num_threads(1)

    def preprocess(self, data):
        """The rows, whatever was sent."""
        return torch.full((ROWS, WIDTH), 0.5)

    def postprocess(self, output):
        """A short answer."""
        return [{"rows": output.shape[0]}]
