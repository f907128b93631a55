"""Adds up what comes in each sequence; the state lives in the handler, as a Triton model's does."""

import numpy as np

sums: dict = {}


def handle(data, context):
    if data is None:
        return None
    answers = []
    for index, row in enumerate(data):
        sequence = context.get_sequence_id(index)
        if context.get_request_header(index, context.header_key_sequence_start) == "true":
            sums[sequence] = 0
        sums[sequence] = sums.get(sequence, 0) + int(row["x"].sum())
        answers.append({"y": np.array([[sums[sequence]]], "i4")})
        if context.get_request_header(index, context.header_key_sequence_end):
            del sums[sequence]
    return answers
