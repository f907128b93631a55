"""An answer in parts."""

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler


class StreamHandler(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def handle(self, data, context):
        for word in ("one ", "two "):
            send_intermediate_predict_response(
                [word] * len(data), context.request_ids, "Intermediate Prediction success", 200, context
            )
        return ["three"] * len(data)
