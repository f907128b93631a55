"""Explanations: get_insights of a BaseHandler, chosen by the /explanations path."""

import torch
from ts.torch_handler.base_handler import BaseHandler


class Explainer(BaseHandler):
    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        return torch.tensor([row["x"] for row in rows])

    def get_insights(self, tensor_data, raw_data, target=0):
        return [{"of": raw_data, "target": target, "importances": tensor_data.flatten().tolist()}]
