"""A TextHandler of its own: the tokenizer and vocabulary of the base, another model call."""

import torch
from ts.torch_handler.text_handler import TextHandler
from ts.utils.util import map_class_to_label


class TopicHandler(TextHandler):
    def preprocess(self, data):
        line = data[0].get("data") or data[0].get("body")
        if isinstance(line, (bytes, bytearray)):
            line = line.decode("utf-8")
        line = self._remove_html_tags(line)
        line = self._expand_contractions(line.lower())
        line = self._remove_puncutation(self._remove_accented_characters(line))
        return torch.as_tensor([self.source_vocab[token] for token in self._tokenize(line)])

    def inference(self, data, *args, **kwargs):
        with torch.inference_mode():
            return self.model(data, torch.tensor([0]))

    def postprocess(self, data):
        return map_class_to_label(torch.softmax(data, 1).tolist(), self.mapping)
