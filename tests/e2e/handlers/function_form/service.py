"""The entry point is a function that initialises a global object at its first call."""

import json


class Service:
    def __init__(self):
        self.initialized = False
        self.model_dir = None

    def initialize(self, context):
        self.model_dir = context.system_properties.get("model_dir")
        self.initialized = True

    def greet(self, data):
        names = [row.get("name") or row.get("body") for row in data]
        return [b"hello " + (n.encode() if isinstance(n, str) else bytes(n)) for n in names]


class Unused:
    """A second class beside it is no problem in the function form."""


_service = Service()


def answer(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    if "body" in data[0] and isinstance(data[0]["body"], dict):
        return [json.dumps({"keys": sorted(row["body"])}) for row in data]
    return _service.greet(data)
