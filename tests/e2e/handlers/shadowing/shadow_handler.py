"""The archive has a json.py of its own; the libraries around it need the real one."""

import json

import torch


def handle(data, context):
    if data is None:
        return None
    return [{"mine": json.MINE, "torch": torch.ones(1).item()}] * len(data)
