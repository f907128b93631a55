"""As `json_tensor.py` of the recordings, and says in "pid" which process answered."""

import json
import os

import torch
from ts.torch_handler.base_handler import BaseHandler


class PidTensorHandler(BaseHandler):
    """Answers `{"y": [floats], "pid": process}`."""

    def preprocess(self, data):
        """The rows of the requests as one tensor."""
        bodies = [row.get("body") or row.get("data") for row in data]
        parsed = [json.loads(body) if isinstance(body, (bytes, bytearray)) else body for body in bodies]
        return torch.tensor([body["x"] for body in parsed], dtype=torch.float32, device=self.device)

    def postprocess(self, output):
        """One answer a row."""
        return [{"y": row, "pid": os.getpid()} for row in output.tolist()]
