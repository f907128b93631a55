"""Streams an answer in parts: `{"parts": N, "bytes": M}` is answered by N pieces of M bytes."""

import json

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler


class PartsHandler(BaseHandler):
    """Has no model."""

    def initialize(self, context):
        """Keep the context, which parts are sent through."""
        self.context = context

    def handle(self, data, context):
        """One request: batches have size 1."""
        body = data[0].get("body") or data[0].get("data")
        asked = json.loads(body) if isinstance(body, (bytes, bytearray)) else body
        part = "x" * asked["bytes"]
        for _ in range(asked["parts"] - 1):
            send_intermediate_predict_response([part], context.request_ids, "", 200, context)
        return [part]
