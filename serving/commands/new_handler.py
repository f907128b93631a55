"""`torchere new handler`: writes a folder with a handler, a model for it, a test and a Makefile.

The generated files are the texts below; in them, `CLASS` and `NAME` are replaced.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from torchere.archiver.arguments import described
from torchere.archiver.atomic import staged
from torchere.archiver.request import MODEL_NAME_PATTERN
from torchere.serving.commands.serve_options import LaunchRefused

FILES = {
    "handler.py": '''\
"""The handler of the model NAME."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch

from torchere.handlers import BaseHandler, PredictionException

WIDTH = 4  # numbers of a request, which the model takes


class CLASS(BaseHandler):
    """Takes {"values": [1, 2, 3, 4]}, and answers {"label": "high", "score": 0.9}.

    One instance belongs to one worker, and answers one batch at a time. BaseHandler loads the model.
    """

    def initialize(self, context: Any) -> None:
        """Read settings once, when the worker starts."""
        super().initialize(context)
        self.labels = list(self.model_yaml_config["handler"]["labels"])  # of model-config.yaml

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        """Return the model's input; `data` has a row for each request of the batch."""
        return torch.stack([values_of(row) for row in data]).to(self.device)

    # `inference` of BaseHandler runs self.model on the result of `preprocess`.

    def postprocess(self, data: torch.Tensor) -> list[dict[str, Any]]:
        """Return one answer for each request, in the order of the batch."""
        scores, places = data.softmax(dim=1).max(dim=1)
        return [
            {"label": self.labels[place], "score": score}
            for place, score in zip(places.tolist(), scores.tolist())
        ]


def values_of(row: dict[str, Any]) -> torch.Tensor:
    """Return the numbers of one request; refuse what the client must change, with its status."""
    body = row.get("data") or row.get("body")  # `data` is the field of a form
    if isinstance(body, (bytes, bytearray, str)):  # as from gRPC and forms, which parse no JSON
        with suppress(ValueError, RecursionError):
            body = json.loads(body)
    values = body.get("values") if isinstance(body, dict) else None
    try:
        tensor = torch.tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = torch.empty(0)
    if tensor.shape != (WIDTH,):
        hint = "send it as Content-Type: application/json"  # without, `curl -d` sends a form
        is_json = not isinstance(body, (bytes, bytearray, str, type(None)))
        found = f"{body!r:.80}" if is_json else f"no JSON: {hint}"
        raise PredictionException(
            f'expected JSON as {{"values": [...]}} with {WIDTH} numbers, found {found}', 400
        )
    return tensor
''',
    "model.py": '''\
"""The class of the model NAME. `python model.py` writes weights to try it with: put yours there instead."""

import torch


class Model(torch.nn.Module):
    """Maps 4 numbers to the scores of 2 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(Model().state_dict(), "model.pth")
''',
    "test_handler.py": '''\
"""Tests of the handler NAME, without a server; change them with the class and the sizes of the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from handler import CLASS
from model import Model

from torchere.handlers import MockContext, PredictionException

HERE = Path(__file__).parent


@pytest.fixture
def context(tmp_path: Path) -> Any:
    """The context of a server that has unpacked the archive, with weights that are known."""
    for name in ("model.py", "model-config.yaml"):
        shutil.copy(HERE / name, tmp_path)
    model = Model()
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
        model.layer.bias.zero_()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    return MockContext(
        model_pt_file="model.pth", model_dir=str(tmp_path), model_yaml_config_file="model-config.yaml"
    )


@pytest.fixture
def handler(context: Any) -> CLASS:
    made = CLASS()
    made.initialize(context)
    return made


def test_each_request_of_a_batch_gets_its_answer(handler: CLASS, context: Any) -> None:
    rows = [
        {"body": {"values": [3, 0, 0, 0]}},
        {"body": {"values": [0, 3, 0, 0]}},
        {"data": bytearray(b'{"values": [0, 3, 0, 0]}')},
    ]
    answers = handler.handle(rows, context)
    assert [answer["label"] for answer in answers] == ["low", "high", "high"]
    assert all(answer["score"] > 0.9 for answer in answers)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (None, "no JSON: send it as Content-Type"),
        (b"text", "no JSON: send it as Content-Type"),
        ({}, "found {}"),
        ({"values": [1, 2]}, "found .*1, 2"),
        (b"[1, 2]", "found .*1, 2"),
        ({"values": "1234"}, "found .*'1234'"),
        ({"values": [10**400, 2, 3, 4]}, "found .*0"),
    ],
)
def test_a_request_without_four_numbers_is_refused(
    handler: CLASS, context: Any, body: Any, found: str
) -> None:
    with pytest.raises(PredictionException, match="expected JSON.*" + found) as refused:
        handler.handle([{"body": body}], context)
    assert refused.value.error_code == 400
''',
    "model-config.yaml": """\
# Settings of the model for the server; a request of the management API may override them.
minWorkers: 1
maxWorkers: 1
batchSize: 8        # requests that the handler gets at once, at most
maxBatchDelay: 10   # ms that the first of them waits for others
responseTimeout: 60 # seconds
exampleRequest: {values: [1, 2, 3, 4]}  # the line that the server prints sends it
# What the handler reads as self.model_yaml_config["handler"].
handler:
  labels: [low, high]
""",
    "Makefile": """\
# make: pack NAME.mar; make test: test the handler; make serve: serve it, until Ctrl+C
PYTHON ?= python3
TORCHERE ?= torchere

NAME.mar: handler.py model.py model.pth model-config.yaml
\t$(TORCHERE) archive --force --model-name NAME --handler handler.py \\
\t  --model-file model.py --serialized-file model.pth --config-file model-config.yaml

model.pth:
\t$(PYTHON) model.py

.PHONY: test serve
test:
\t@$(PYTHON) -c 'import pytest, torchere.handlers' || { echo 'make test needs pytest and torchere:' \\
\t  '$(PYTHON) -m pip install pytest; or name their Python: make test PYTHON=...'; exit 1; }
\t$(PYTHON) -m pytest -q test_handler.py

serve: NAME.mar
\t$(TORCHERE) serve NAME.mar
""",
}


def add_new(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere new handler` to `parser`, which is that of `torchere new`."""
    described(parser, "Begin something new.", "torchere new handler my_model")
    handler = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "handler", help="write a handler, a test of it, a model-config.yaml and a Makefile that packs it"
    )
    text = (
        "Write a folder with a handler of your own, and all that it needs to be tested, packed and served:\n"
        "handler.py, model.py, test_handler.py, model-config.yaml, Makefile."
    )
    described(handler, text, "torchere new handler my_model && cd my_model && make test && make serve")
    handler.add_argument("name", metavar="NAME", help="name of the model, and of the folder that is made")
    handler.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Write all files to the new folder, or none."""
    name: str = options.name
    if not MODEL_NAME_PATTERN.fullmatch(name):
        raise LaunchRefused(f"{name!r} can't be a model's name: expected letters, digits, _, - and .")
    folder = Path(name)
    if os.path.lexists(folder):  # an empty folder would be replaced
        raise LaunchRefused(f"{folder} can't be made: File exists; choose another name")
    try:
        with staged(folder) as work:
            work.mkdir()
            for file, text in FILES.items():
                made = text.replace("CLASS", class_name(name)).replace("NAME", name)
                (work / file).write_text(made, encoding="utf-8")
    except OSError as error:
        raise LaunchRefused(f"{folder} can't be made: {error.strerror}") from error
    print(f"written: {', '.join(sorted(FILES))} in {folder}/")
    print(f"next: cd {folder} && make test && make && make serve")
    return 0


def class_name(name: str) -> str:
    """Return the name of the handler's class: `my-net` becomes `MyNetHandler`."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    joined = "".join(word[:1].upper() + word[1:] for word in words)
    return f"{joined if joined[:1].isalpha() else 'Model' + joined}Handler"
