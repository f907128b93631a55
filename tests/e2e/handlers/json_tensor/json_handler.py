"""A subclass of BaseHandler that overrides what is before and after the model, and calls super()."""

import json

import torch
from ts.torch_handler.base_handler import BaseHandler


class JsonHandler(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        self.scale = float(self.model_yaml_config.get("handler", {}).get("scale", 1))

    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        rows = [json.loads(row) if isinstance(row, (bytes, bytearray)) else row for row in rows]
        return super().preprocess([row["x"] for row in rows]) * self.scale

    def inference(self, data, *args, **kwargs):
        return super().inference(data.float(), *args, **kwargs)

    def postprocess(self, data):
        return [{"y": y} for y in super().postprocess(torch.flatten(data))]
