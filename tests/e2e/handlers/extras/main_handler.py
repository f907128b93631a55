"""Everything that --extra-files can bring: labels, a helper module, a package, data by relative path."""

import json
import os
from importlib import import_module

import helper
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import load_label_mapping, map_class_to_label
from vocab import WORDS, lookup
from vocab.rules import longest


class ExtrasHandler(BaseHandler):
    def initialize(self, context):
        model_dir = context.system_properties.get("model_dir")
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        with open("settings.json") as file:  # the working directory is the archive's
            self.settings = json.load(file)
        self.late = import_module("vocab.rules")
        self.initialized = True

    def handle(self, data, context):
        label = map_class_to_label([[1.0]], self.mapping, [[2]])[0]
        answer = {
            "label": label,
            "helped": helper.shout("hi"),
            "word": lookup("b"),
            "longest": longest(WORDS),
            "same": self.late.longest is longest,
            "setting": self.settings["threshold"],
        }
        return [answer] * len(data)
