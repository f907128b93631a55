"""Pictures as clients send them in JSON and forms: base64 text, data URLs, several fields."""

import base64
import io

from PIL import Image
from ts.torch_handler.vision_handler import VisionHandler


class B64Handler(VisionHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        images = []
        for row in data:
            image = row.get("data") or row.get("body")
            if isinstance(image, dict):
                image = image["image"]
            if isinstance(image, str):
                image = base64.b64decode(image.partition("base64,")[2] or image)
            images.append((Image.open(io.BytesIO(image)), row.get("caption", b"").decode()))
        return images

    def inference(self, data, *args, **kwargs):
        return data

    def postprocess(self, data):
        return [{"size": list(image.size), "caption": caption} for image, caption in data]
