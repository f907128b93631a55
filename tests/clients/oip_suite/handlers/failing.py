"""Raises."""


def handle(data, context):
    if data is None:
        return None
    raise RuntimeError("this model always fails")
