"""Refuses with a status of its own, or fails in other ways."""

from ts.utils.util import PredictionException


def handle(data, context):
    if data is None:
        return None
    wish = data[0]["body"].decode() if hasattr(data[0]["body"], "decode") else str(data[0]["body"])
    if wish.isdigit():
        raise PredictionException("not today", int(wish))
    if wish == "default":
        raise PredictionException("plain")
    if wish == "bug":
        raise KeyError("secret")
    if wish == "memory":
        raise MemoryError("none left")
    if wish == "exit":
        raise SystemExit(3)
    if wish == "short":
        return []
    if wish == "type":
        return {"not": "a list"}
    return ["fine"]
