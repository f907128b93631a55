"""A Hugging Face folder over several ranks, from `torchere archive --parallel` to the answers of a server."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from torchere.serving.commands.cli import main

SPLITS = {"tensor": "tensor=2", "pipeline": "pipeline=2", "both": "tensor=2,pipeline=2"}
ROWS = [[5, 3, 9, 1], [7, 7, 2, 40, 11, 49, 8], [1]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes it."""
    import transformers  # takes a second, also of a process that runs other tests

    torch.manual_seed(4)
    make: Any = transformers.LlamaConfig
    config = make(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 32},
    )
    folder = tmp_path_factory.mktemp("models") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(open_server: Any, store: Path, llama: Path) -> Any:
    """The folder as three models, which the server loads at the same time."""
    for name, split in SPLITS.items():
        given = [f"--model-name={name}", f"--serialized-file={llama}", f"--export-path={store}"]
        assert main(["archive", *given, f"--parallel={split}"]) == 0
    with ThreadPoolExecutor(len(SPLITS)) as threads:
        loads = threads.map(lambda name: open_server.register(f"{name}.mar", initial_workers=1), SPLITS)
        assert [load.status for load in loads] == [200] * len(SPLITS)
    return open_server


@pytest.fixture(scope="module")
def logits(llama: Path) -> Any:
    """Returns the answer of one process to a row of tokens."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(llama, local_files_only=True).eval()

    def answer(row: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=torch.tensor([row])).logits[0]
        return found

    return answer


def ask(server: Any, model: str, row: list[int]) -> torch.Tensor:
    body = json.dumps({"input_ids": row, "attention_mask": [1] * len(row)}).encode()
    answer = server.call("POST", f"/predictions/{model}", body, content_type="application/json")
    assert answer.status == 200, answer.body
    return torch.tensor(answer.json())


def ranks_of(server: Any, model: str) -> list[psutil.Process]:
    described = server.call("GET", f"/models/{model}", api="management").json()[0]
    first = psutil.Process(described["workers"][0]["pid"])
    return [first, *first.children()]


@pytest.mark.parametrize("model", SPLITS)
def test_the_answers_are_those_of_one_process(server: Any, logits: Any, model: str) -> None:
    for row in ROWS:
        torch.testing.assert_close(ask(server, model, row), logits(row), atol=1e-4, rtol=0)


def test_tensors_of_the_open_inference_protocol_are_answered_alike(server: Any, logits: Any) -> None:
    row = ROWS[1]
    inputs = [
        {"name": name, "shape": [1, len(row)], "datatype": "INT64", "data": data}
        for name, data in (("input_ids", row), ("attention_mask", [1] * len(row)))
    ]
    body = json.dumps({"inputs": inputs}).encode()
    answer = server.call("POST", "/v2/models/both/infer", body, content_type="application/json")
    assert answer.status == 200, answer.body
    (output,) = answer.json()["outputs"]
    found = torch.tensor(output["data"]).reshape(output["shape"])
    torch.testing.assert_close(found[0], logits(row), atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", SPLITS)
def test_the_libraries_are_imported_once_for_all_ranks(server: Any, model: str) -> None:
    # Importing transformers takes rank 0 seconds of a core. The others take a tenth of them in all.
    first, *others = [rank.cpu_times() for rank in ranks_of(server, model)]
    for each in others:
        assert each.user + each.system < 0.4 * (first.user + first.system)


def test_a_rank_that_is_killed_is_named_and_the_answers_stay_right(server: Any, logits: Any) -> None:
    before = ranks_of(server, "tensor")
    os.kill(before[1].pid, signal.SIGKILL)
    limit_s = time.monotonic() + 60
    while before[0].is_running() or server.call("GET", "/v2/models/tensor/ready").status != 200:
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    described = server.call("GET", "/models/tensor", api="management").json()[0]
    assert described["torchere"]["losses"][0]["lastCause"] == "rank 1: killed by signal 9 (SIGKILL)"
    for row in ROWS:
        torch.testing.assert_close(ask(server, "tensor", row), logits(row), atol=1e-4, rtol=0)
    assert not any(rank.is_running() for rank in before)
