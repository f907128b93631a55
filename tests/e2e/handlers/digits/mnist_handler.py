"""The handler that most TorchServe tutorials begin with, on a transform without torchvision."""

import numpy
import torch
from ts.torch_handler.image_classifier import ImageClassifier


def grey_28(image):
    pixels = numpy.asarray(image.convert("L").resize((28, 28)), dtype="float32") / 255
    return (torch.from_numpy(pixels)[None] - 0.1307) / 0.3081


class MNISTDigitClassifier(ImageClassifier):
    image_processing = staticmethod(grey_28)

    def __init__(self):
        super(MNISTDigitClassifier, self).__init__()  # noqa: UP008 - as people write it

    def postprocess(self, data):
        return data.argmax(1).tolist()
