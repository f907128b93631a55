"""Bare loops over a model, and the rows that compare with them."""

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import real_models, rows_image, rows_models, rows_threads
from harness.bare import bare_loop
from harness.errors import Failed
from harness.figures import judge
from harness.models import Workshop
from harness.rows_models import LITE0, binary_request
from peers.bare_loop import Work, pixels
from PIL import Image

from torchere.archiver.reader import open_archive
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.vision.transform import ImageTransform

LEVELS = (127 / 255,) * 3, (128 / 255,) * 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A TorchScript file that takes [rows, 4]."""
    path = tmp_path / "linear.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.trace(torch.nn.Linear(4, 2).eval(), torch.zeros(1, 4)).save(str(path))
    return path


@pytest.fixture
def row(tmp_path: Path) -> Path:
    path = tmp_path / "row.npy"
    np.save(path, np.ones((1, 4), np.float32))
    return path


def test_the_best_batch_size_of_those_asked_for_is_measured(file: Path, row: Path) -> None:
    found = bare_loop(file, [row], 0.1, 2, "--batches", "2,4")

    assert found["batch"] in (2, 4)
    assert found["loops"] in (1, 2)
    assert found["per_second"] > 0


def test_one_thread_for_each_loop_is_all_that_each_tries(file: Path, row: Path) -> None:
    assert bare_loop(file, [row], 0.1, 2, "--batches", "1", "--each")["loops"] == 2


def test_a_loop_that_fails_says_why(row: Path, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"nothing\.pt does not exist"):
        bare_loop(tmp_path / "nothing.pt", [row], 0.1, 1)


def test_a_batch_is_the_row_so_many_times_and_runs_at_least_once(file: Path, row: Path) -> None:
    work = Work(file, [row])

    assert [tensor.shape for tensor in work.inputs(3)] == [(3, 4)]
    assert work.run(3, lambda: True) == 3


def test_a_model_is_optimised_as_the_server_does_it(file: Path, row: Path) -> None:
    plain, fast = Work(file, [row]).model, Work(file, [row], optimize=True).model

    kind = "mkldnn::_linear_pointwise"
    assert (len(plain.graph.findAllNodes(kind)), len(fast.graph.findAllNodes(kind))) == (0, 1)


def test_a_bare_loop_sees_the_pixels_that_the_handler_would_show_it() -> None:
    picture = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save(picture, "JPEG")

    ours = ImageTransform(256, 224, *LEVELS)(Image.open(picture))
    torch.testing.assert_close(pixels(picture.getvalue()), ours, rtol=0, atol=1e-5)


def test_the_request_holds_the_tensors_after_a_head_that_says_where() -> None:
    array = np.arange(6, dtype=np.float32).reshape(1, 6)
    body, headers = binary_request(LITE0.signature, [array])

    length = int(headers["Inference-Header-Content-Length"])
    (tensor,) = json.loads(body[:length])["inputs"]
    assert tensor["shape"] == [1, 6]
    assert tensor["parameters"] == {"binary_data_size": 24}
    assert body[length:] == array.tobytes()


def test_every_goal_names_contenders_of_its_row() -> None:
    for row in (*rows_image.rows(), *rows_models.rows(), *rows_threads.rows()):
        for goal in row.goals:
            assert {goal.ours, *goal.against} <= set(row.contenders), row.key


def test_a_ratio_without_a_target_is_shown_and_neither_met_nor_missed() -> None:
    (row,) = rows_threads.rows()
    allowed = next(goal for goal in row.goals if goal.target is None)
    names = (allowed.ours, *allowed.against)
    verdict = judge(
        allowed, {name: {"forward_per_s": [100.0 / number]} for number, name in enumerate(names, 1)}
    )

    assert verdict.spread is not None
    assert verdict.spread.median == 2.0
    assert verdict.met is None


def test_the_model_is_served_with_the_batch_that_its_server_was_fastest_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_models, "_bare_loop", lambda *_: {"loops": 2.0})
    monkeypatch.setattr(
        rows_models, "_rates", lambda _subject, plan, _conditions: {"per_second": -abs(plan.batch - 4)}
    )

    assert rows_models.plan_of(LITE0, Workshop(tmp_path)) == rows_models.Plan(batch=4, executors=2)


def test_an_archive_is_packed_anew_for_each_batch_size(file: Path, tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    for batch in (1, 16):
        config = rows_models.Plan(batch, 2).config
        real_models.tensor_archive(shop, "m", file, LITE0.signature, config, load=TorchScriptOptions())

        assert open_archive(shop.store / "m.mar").read_text("model-config.yaml") == config
