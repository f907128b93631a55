"""A class of its own, without a base class: module globals and the environment, as old handlers use them."""

import logging
import os

import torch

logger = logging.getLogger(__name__)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
CALLS = 0


class ModelHandler(object):  # noqa: UP004 - as people write it
    """A scoring model that needs no weights."""

    def __init__(self):
        self.initialized = False
        self.model = None
        self.device = None

    def initialize(self, context):
        properties = context.system_properties
        self.manifest = context.manifest
        gpu_id = properties.get("gpu_id")
        self.device = torch.device("cuda:" + str(gpu_id) if torch.cuda.is_available() else "cpu")
        self.model = torch.nn.Identity().to(self.device)
        self.batch_size = properties.get("batch_size")
        self.initialized = True
        logger.info("class_form is ready on %s", self.device)

    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        return torch.tensor([float(row["value"]) for row in rows], device=self.device)

    def inference(self, batch):
        with torch.no_grad():
            return self.model(batch) * 2

    def postprocess(self, output):
        return [{"doubled": value} for value in output.tolist()]

    def handle(self, data, context):
        global CALLS  # noqa: PLW0603 - as people write it
        CALLS += 1
        answers = self.postprocess(self.inference(self.preprocess(data)))
        for answer in answers:
            answer.update(
                calls=CALLS,
                name=context.manifest["model"]["modelName"],
                batch_size=self.batch_size,
                here=os.path.realpath(os.getcwd())
                == os.path.realpath(context.system_properties["model_dir"]),
                parallel=os.environ["TOKENIZERS_PARALLELISM"],
            )
        return answers
