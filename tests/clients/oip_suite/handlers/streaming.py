"""Counts up to what came, one part a number."""

import numpy as np
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    count = int(data[0]["x"].ravel()[0])
    for number in range(count - 1):
        part = {"y": np.array([number], "i4")}
        send_intermediate_predict_response([part], context.request_ids, "part", 200, context)
    return [{"y": np.array([count - 1], "i4")}]
