"""The small models that stand for those which TorchServe's tests download, as archives."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "MAR-INF/MANIFEST.json"
# By model: the source of its handler.
HANDLERS = {
    "ok": "def handle(data, context):\n    return ['OK'] * len(data or [])\n",
    "kinds": (
        "def handle(data, context):\n"
        "    return [type(row.get('data') or row.get('body')).__name__ for row in data or []]\n"
    ),
    "headers": (
        "def handle(data, context):\n"
        "    for index in range(len(data or [])):\n"
        "        context.set_response_content_type(index, 'text/plain')\n"
        "        context.set_response_header(index, 'dummy', '1')\n"
        "    return ['bytearray' for row in data or []]\n"
    ),
    "memory_at_load": "def handle(data, context):\n    raise MemoryError('too large')\n",
    "memory_at_work": (
        "def handle(data, context):\n    if data:\n        raise MemoryError('too large')\n    return []\n"
    ),
    "batch_status": (
        "def handle(data, context):\n"
        "    for index in range(len(data or [])):\n"
        "        context.set_response_status(507, idx=index)\n"
        "    return ['Invalid response' for row in data or []]\n"
    ),
    "fails_to_load": (
        "class Failing:\n"
        "    def initialize(self, context):\n"
        "        self.first()\n"
        "    def first(self):\n"
        "        self.second()\n"
        "    def second(self):\n"
        "        assert False, 'on purpose'\n"
        "    def handle(self, data, context):\n"
        "        return None\n"
    ),
    "slow_to_load": (
        "import time\n"
        "class Slow:\n"
        "    def initialize(self, context):\n"
        "        time.sleep(3)\n"
        "    def handle(self, data, context):\n"
        "        return ['loaded'] * len(data)\n"
    ),
    "too_slow": (
        "import time\n"
        "class Slow:\n"
        "    def initialize(self, context):\n"
        "        print('initialised', flush=True)\n"
        "    def handle(self, data, context):\n"
        "        time.sleep(4)\n"
        "        return ['late'] * len(data)\n"
    ),
    "parts": (
        "from ts.handler_utils.utils import send_intermediate_predict_response\n"
        "def handle(data, context):\n"
        "    if isinstance(data, list):\n"
        "        for _ in range(3):\n"
        "            send_intermediate_predict_response(\n"
        "                ['hello'], context.request_ids, 'Intermediate Prediction success', 200, context\n"
        "            )\n"
        "        return ['hello world '] * len(data)\n"
    ),
    "numbers": (
        "from ts.torch_handler.base_handler import BaseHandler\n"
        "class Numbers(BaseHandler):\n"
        "    def initialize(self, context):\n"
        "        self.sums = {}\n"
        "        self.initialized = True\n"
        "    def handle(self, data, context):\n"
        "        results = []\n"
        "        for index, row in enumerate(data):\n"
        "            name = context.get_sequence_id(index)\n"
        "            if context.get_request_header(index, context.header_key_sequence_start):\n"
        "                self.sums[name] = 0\n"
        "            self.sums[name] = self.sums.get(name, 0) + int(row.get('data') or row.get('body'))\n"
        "            context.set_response_header(index, context.header_key_sequence_id, name)\n"
        "            results.append(str(self.sums[name]))\n"
        "        return results\n"
    ),
    "lengths": (
        "def handle(data, context):\n"
        "    values = [row.get('data') or row.get('body') for row in data or []]\n"
        "    return [len(value) if isinstance(value, (str, list)) else value for value in values]\n"
    ),
    "upper": (
        "def handle(data, context):\n"
        "    return [bytes(row.get('data') or row.get('body')).upper() for row in data or []]\n"
    ),
    "metric": (
        "def handle(data, context):\n"
        "    if data:\n"
        "        context.metrics.add_counter('Own', 2, 0)\n"
        "    return ['OK'] * len(data or [])\n"
    ),
}
CONFIGS = {
    "four": "minWorkers: 1\nmaxWorkers: 4\nmaxBatchDelay: 100\nbatchSize: 4\n",
    "slow_to_load": "minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 1\nstartupTimeout: 30\n",
    "slower_than_allowed": "minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 1\nstartupTimeout: 1\n",
    "too_slow": "minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 1\n",
    "numbers": (
        "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nmaxNumSequence: 4\nsequenceMaxIdleMSec: 5000\n"
        "maxSequenceJobQueueSize: 10\nsequenceBatching: true\n"
    ),
}
SOURCES = {"four": "ok", "slower_than_allowed": "slow_to_load", "ok_v2": "ok"}
VERSIONS = {"ok": "1.11", "ok_v2": "1.2.1"}


def build(folder: Path) -> None:
    """Write every archive to an empty folder."""
    for name in sorted({*HANDLERS, *SOURCES}):
        write_archive(folder / f"{name}.mar", name)
    build_digits(folder)


# A model of digits in the forms that inference_data.json has: eager, scripted and traced.
DIGITS = """
import torch

class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.last(x)
"""
DIGITS_HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class DigitHandler(BaseHandler):
    def preprocess(self, data):
        rows = [list(bytes(row.get("data") or row.get("body"))) for row in data]
        return torch.tensor(rows, dtype=torch.float32)

    def postprocess(self, data):
        return data.argmax(1).tolist()
"""
DIGIT_FORMS = ("eager", "scripted", "traced")


def build_digits(folder: Path) -> None:
    """Write the archives `digits_FORM.mar`, whose model answers which of two bytes is larger."""
    import torch

    scope: dict[str, Any] = {}
    exec(DIGITS, scope)
    module = scope["Digits"]()
    with torch.no_grad():
        module.last.weight.copy_(torch.eye(2))
        module.last.bias.zero_()
    for form in DIGIT_FORMS:
        weights = io.BytesIO()
        if form == "eager":
            torch.save(module.state_dict(), weights)
        else:
            plain = torch.nn.Sequential(module.last)  # a class made by exec has no source to script
            example = torch.zeros(1, 2)
            made = torch.jit.script(plain) if form == "scripted" else torch.jit.trace(plain, example)
            torch.jit.save(made, weights)
        model = {"modelName": f"digits_{form}", "handler": "service.py", "modelVersion": "1.0"}
        model |= {"serializedFile": "weights.pt"} | ({"modelFile": "digits.py"} if form == "eager" else {})
        files: dict[str, str | bytes] = {"service.py": DIGITS_HANDLER, "digits.py": DIGITS}
        files["weights.pt"] = weights.getvalue()
        write(folder / f"digits_{form}.mar", model, files)


def write_archive(path: Path, name: str) -> None:
    model = {"modelName": name, "handler": "service.py", "modelVersion": VERSIONS.get(name, "1.0")}
    files = {"service.py": HANDLERS[SOURCES.get(name, name)]}
    if name in CONFIGS:
        model["configFile"] = "model-config.yaml"
        files["model-config.yaml"] = CONFIGS[name]
    write(path, model, files)


def write(path: Path, model: Mapping[str, str], files: Mapping[str, str | bytes]) -> None:
    """Write an archive."""
    manifest = {
        "createdOn": "01/01/2026 00:00:00",
        "runtime": "python",
        "model": model,
        "archiverVersion": "0.12.0",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(MANIFEST, json.dumps(manifest))
