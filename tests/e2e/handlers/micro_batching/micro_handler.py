"""Pipelines a batch in parts, with the settings of the model's yaml."""

import threading

import torch
from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.base_handler import BaseHandler


class MicroHandler(BaseHandler):
    def __init__(self):
        super().__init__()
        self.handle = MicroBatching(self)

    def initialize(self, ctx):
        self.manifest = ctx.manifest
        self.device = torch.device("cpu")
        config = ctx.model_yaml_config["micro_batching"]
        self.handle.parallelism = config["parallelism"]
        self.handle.micro_batch_size = config["micro_batch_size"]
        self.initialized = True

    def preprocess(self, data):
        return [int(row["body"]) for row in data]

    def inference(self, data):
        return [(number, len(data), threading.current_thread().name) for number in data]

    def postprocess(self, data):
        return [{"square": n * n, "part": part, "thread": name.split("_")[0]} for n, part, name in data]
