"""Every form of a model to every format: packed, loaded by the server's handler, and the same answers."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models import build
from torchere.archiver.signature import Signature, parse

Pack = Callable[..., Path]
Serve = Callable[..., list[Any]]
BATCH = "1:64"
CLASS = {"factory": "net_module:net"}
# What the tests take of each form: where the weights are, and whether the class must be told.
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "state dict": ("state.weights", CLASS),
    "Lightning checkpoint": ("lightning.weights", CLASS),
    "safetensors": ("numbers.weights", CLASS),
    "distributed checkpoint": ("sharded", CLASS),
    "TorchScript": ("script.model", {}),
    "exported program": ("program.model", {}),
}


def signature_in(archive: Path) -> Signature:
    return parse(open_archive(archive).read_text("signature.json"))


def build_in(archive: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(open_archive(archive).read_text("MAR-INF/build.json"))
    return found


def check_answers(forms: Any, answers: list[Any], rows: torch.Tensor) -> None:
    wanted = forms.answer(rows)
    assert len(answers) == len(rows)
    for name in ("scores", "hidden"):
        found = torch.tensor([answer[name] for answer in answers])
        torch.testing.assert_close(found, wanted[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_format", ["torchscript", "export"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_any_form_is_compiled_and_answers_as_before(
    forms: Any, pack: Pack, serve: Serve, form: str, model_format: str
) -> None:
    name, where = FORMS[form]
    archive = pack(
        serialized_file=forms.file(name),
        model_format=model_format,
        example=forms.file("example.npy"),
        dynamic_batch=BATCH,
        **where,
    )
    signature = signature_in(archive)
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [
        ("features", "FP32", (-1, 8))
    ]
    assert [(spec.name, spec.shape) for spec in signature.outputs] == [
        ("scores", (-1, 3)),
        ("hidden", (-1, 16)),
    ]
    assert build_in(archive) == {"format": model_format, "torch": torch.__version__.partition("+")[0]}
    rows = torch.rand(3, 8)
    check_answers(forms, serve(archive, [{"body": row.tolist()} for row in rows]), rows)


@pytest.mark.parametrize(
    ("name", "suffix"), [("script.model", ".pt"), ("program.model", ".pt2")], ids=["TorchScript", "exported"]
)
def test_what_a_server_loads_by_itself_may_stay_as_it_is(
    forms: Any, pack: Pack, serve: Serve, name: str, suffix: str
) -> None:
    archive = pack(serialized_file=forms.file(name), example=forms.file("example.npy"))
    serialized = open_archive(archive).manifest.serialized_file
    assert serialized is not None and serialized.endswith(suffix)
    assert zipfile.ZipFile(archive).read(serialized) == forms.file(name).read_bytes()
    rows = torch.rand(2, 8)
    check_answers(forms, serve(archive, [{"body": row.tolist()} for row in rows]), rows)


@pytest.mark.parametrize("name", ["state.weights", "numbers.weights", "lightning.weights", "sharded"])
def test_a_class_stays_python_and_its_weights_become_a_plain_state_dict(
    forms: Any, pack: Pack, serve: Serve, name: str
) -> None:
    archive = pack(
        serialized_file=forms.file(name),
        model_file=forms.file("net_module.py"),
        example=forms.file("example.npy"),
    )
    assert open_archive(archive).manifest.model_file == "net_module.py"
    rows = torch.rand(2, 8)
    check_answers(forms, serve(archive, [{"body": row.tolist()} for row in rows]), rows)


@pytest.mark.parametrize("more", [{"model_format": "torchscript"}, {}])
def test_an_example_without_a_batch_dimension_is_refused_with_the_shape_that_is_wanted(
    forms: Any, pack: Pack, tmp_path: Path, more: dict[str, str]
) -> None:
    np.save(tmp_path / "row.npy", forms.rows[0].numpy())
    model = {"serialized_file": forms.file("state.weights"), "model_file": forms.file("net_module.py")}
    with pytest.raises(
        ModelRefused, match=r"FP32\[8\] failed: .*; it runs on FP32\[1, 8\]: give the example this batch"
    ):
        pack(**model, **more, example=tmp_path / "row.npy")


def test_a_pickled_module_is_taken_only_if_it_is_trusted(forms: Any, pack: Pack, serve: Serve) -> None:
    given = {
        "serialized_file": forms.file("whole.weights"),
        "model_format": "torchscript",
        "example": forms.file("example.npy"),
    }
    with pytest.raises(ModelRefused, match=r"more than tensors \(it imports net_module\.Net.*--allow-pickle"):
        pack(**given)
    rows = torch.rand(2, 8)
    answers = serve(pack(**given, allow_pickle=True), [{"body": row.tolist()} for row in rows])
    check_answers(forms, answers, rows)


def test_a_pickled_module_fills_the_class_of_a_model_file(forms: Any, pack: Pack, serve: Serve) -> None:
    archive = pack(
        serialized_file=forms.file("whole.weights"),
        model_file=forms.file("net_module.py"),
        example=forms.file("example.npy"),
        allow_pickle=True,
    )
    rows = torch.rand(2, 8)
    check_answers(forms, serve(archive, [{"body": row.tolist()} for row in rows]), rows)


def test_a_pickled_module_whose_code_is_elsewhere_is_refused_with_a_way_out(
    pack: Pack, tmp_path: Path
) -> None:
    class_of_a_notebook = type("Net", (torch.nn.Linear,), {"__module__": "__main__"})
    sys.modules["__main__"].Net = class_of_a_notebook  # type: ignore[attr-defined]
    torch.save(class_of_a_notebook(2, 2), tmp_path / "net.pt")
    del sys.modules["__main__"].Net
    with pytest.raises(
        ModelRefused, match=r"code of what was pickled is not here: .*'Net'.*give --model-file"
    ):
        pack(serialized_file=tmp_path / "net.pt", allow_pickle=True, model_format="export")


def test_an_exported_program_goes_with_its_own_example_and_ranges(forms: Any, pack: Pack) -> None:
    archive = pack(serialized_file=forms.file("program.model"), model_format="export")
    assert signature_in(archive).batched


def test_an_archive_of_an_exported_program_holds_no_pickle(forms: Any, pack: Pack, tmp_path: Path) -> None:
    archive = pack(serialized_file=forms.file("program.model"), model_format="export")
    model = open_archive(archive).extract(tmp_path / "out") / "model.pt2"
    with zipfile.ZipFile(model) as package:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in package.infolist()}
    assert sizes["data/sample_inputs/model.pt"] == 0


def test_without_a_dynamic_batch_an_export_takes_the_examples_size_only(forms: Any, pack: Pack) -> None:
    archive = pack(
        **CLASS,
        serialized_file=forms.file("state.weights"),
        model_format="export",
        example=forms.file("example.npy"),
    )
    assert signature_in(archive).inputs[0].shape == (2, 8)


def test_a_batch_may_have_one_row_whatever_its_least_size_is(
    forms: Any, pack: Pack, serve: Serve, tmp_path: Path
) -> None:
    torch.save(torch.rand(4, 8), tmp_path / "four.pt")
    archive = pack(
        **CLASS,
        serialized_file=forms.file("state.weights"),
        model_format="export",
        example=tmp_path / "four.pt",
        dynamic_batch="4:8",
        verify=True,
    )
    rows = torch.rand(1, 8)
    check_answers(forms, serve(archive, [{"body": row.tolist()} for row in rows]), rows)


def test_the_limit_of_drift_and_its_acceptance_count_for_other_sizes_too(
    forms: Any, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*given: Any, quantised: bool) -> None:
        assert not quantised
        raise ModelRefused(f"at most {given[-1]}")

    monkeypatch.setattr(build, "refuse_other_sizes", differ)
    given = {
        **CLASS,
        "serialized_file": forms.file("state.weights"),
        "model_format": "export",
        "example": forms.file("example.npy"),
        "dynamic_batch": BATCH,
        "verify": True,
    }
    for asked, limit in ({}, "0.001"), ({"max_drift": 0.5}, "0.5"):
        with pytest.raises(ModelRefused, match=f"at most {limit}$"):
            pack(**given, **asked)
    assert pack(**given, accept_drift=True).exists()


def test_scripting_keeps_a_branch_that_tracing_would_lose(pack: Pack, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "branch.py").write_text(
        "import torch\n\n\nclass Branch(torch.nn.Module):\n"
        "    def forward(self, x: torch.Tensor):\n"
        "        if x.shape[1] > 3:\n            return x * 2\n        return x\n"
    )
    torch.save(torch.ones(2, 2), tmp_path / "x.pt")
    archive = pack(
        model_file=tmp_path / "branch.py", model_format="torchscript", script=True, example=tmp_path / "x.pt"
    )
    module = torch.jit.load(open_archive(archive).extract(tmp_path / "out") / "model.pt")
    assert module(torch.ones(1, 5)).tolist() == [[2.0] * 5]


FORCES = """\
import torch


class Forces(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = torch.nn.Linear(3, 1)

    def forward(self, x):
        with {gradients}:
            x = x.{own}().requires_grad_(True)
            return -torch.autograd.grad(self.energy(x).tanh().sum(), x)[0]
"""


def test_a_class_that_needs_gradients_is_refused_with_how_a_server_runs_it(
    pack: Pack, serve: Serve, tmp_path: Path
) -> None:
    torch.save(torch.rand(2, 3), tmp_path / "example.pt")
    file = tmp_path / "forces.py"
    file.write_text(FORCES.format(gradients="torch.enable_grad()", own="detach"))
    with pytest.raises(ModelRefused, match=r"in inference mode.*torch\.inference_mode\(False\)"):
        pack(model_file=file, example=tmp_path / "example.pt", model_format="keep")

    file.write_text(FORCES.format(gradients="torch.inference_mode(False), torch.enable_grad()", own="clone"))
    archive = pack(model_file=file, example=tmp_path / "example.pt", model_format="keep")
    (answer,) = serve(archive, [{"body": [0.1, 0.2, 0.3]}])
    assert len(answer) == 3


COUNTED = """\
import torch


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.unused = torch.nn.Conv2d(1, 1, 1)

    def forward(self, x):
        {first}
        self.count.add_(1)
        return x + self.count
"""


@pytest.mark.parametrize("first", ["pass", "assert x.shape[1] == 3"])  # the second is not traced as a graph
@pytest.mark.parametrize("model_format", ["torchscript", "export"])
def test_a_model_that_keeps_state_is_compared_from_the_same_state(
    pack: Pack, serve: Serve, tmp_path: Path, model_format: str, first: str
) -> None:
    torch.save(torch.rand(2, 3), tmp_path / "example.pt")
    (tmp_path / "counted.py").write_text(COUNTED.format(first=first))
    archive = pack(
        model_file=tmp_path / "counted.py",
        example=tmp_path / "example.pt",
        model_format=model_format,
        verify=True,
    )
    (answer,) = serve(archive, [{"body": [[0.0, 0.0, 0.0]] * 2}])
    assert answer == [[1.0, 1.0, 1.0]] * 2


def test_a_model_that_mixes_rows_is_not_batched(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "mixing.py").write_text(
        "import torch\n\n\nclass Mixing(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x - x.mean(0)\n"
    )
    torch.save(torch.rand(2, 4), tmp_path / "x.pt")
    given = {
        "model_file": tmp_path / "mixing.py",
        "model_format": "torchscript",
        "example": tmp_path / "x.pt",
    }
    assert not signature_in(pack(**given)).batched
    with pytest.raises(ModelRefused, match="depends on the other rows"):
        pack(**given, dynamic_batch=BATCH)


SIZES = {
    "root": "x / x.shape[1] ** 0.5",
    "masked": "x.new_zeros(x.shape[1] | 3)",
    "sparse": "x.to_sparse()",
}


@pytest.mark.parametrize("model_format", ["keep", "torchscript", "export"])
@pytest.mark.parametrize("name", SIZES)
def test_what_a_server_would_not_take_is_refused_when_packing(
    pack: Pack, serve: Serve, tmp_path: Path, name: str, model_format: str
) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        f"    def forward(self, x):\n        return {SIZES[name]}\n"
    )
    torch.save(torch.rand(2, 5), tmp_path / "x.pt")
    given: dict[str, Any] = {"model_file": tmp_path / f"{name}.py", "example": tmp_path / "x.pt"}
    given |= {"model_format": model_format, "dynamic_sizes": ("x:1=2:64",)}
    if name == "sparse" or (name, model_format) == ("masked", "export"):
        with pytest.raises(
            ModelRefused, match=r"sparse tensor; expected a dense|a file that servers do not load"
        ):
            pack(**given)
    else:
        assert len(serve(pack(**given), [{"x": np.ones((2, 7), np.float32)}])) == 1


def test_a_model_runs_a_few_times_before_it_is_verified(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(
        "import torch\n\nRUNS = []\n\n\nclass Counted(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        with open({str(tmp_path / 'runs')!r}, 'a') as file:\n            file.write('.')\n"
        "        return x * 2\n"
    )
    torch.save(torch.rand(2, 5), tmp_path / "x.pt")
    pack(model_file=tmp_path / "counted.py", model_format="keep", example=tmp_path / "x.pt")
    assert len((tmp_path / "runs").read_text()) <= 13


@pytest.mark.parametrize("quantize", [None, "int8-dynamic"])
def test_a_size_that_varies_is_right_in_torchscript(
    pack: Pack, serve: Serve, tmp_path: Path, quantize: str | None
) -> None:
    (tmp_path / "mean.py").write_text(
        "import torch\n\n\nclass Mean(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.one = torch.nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.one(x).sum(1) / float(x.shape[1])\n"
    )
    torch.save(torch.rand(2, 6, 4), tmp_path / "x.pt")
    given: dict[str, Any] = {"model_file": tmp_path / "mean.py", "example": tmp_path / "x.pt"}
    given |= {"model_format": "torchscript", "dynamic_sizes": ("x:1=1:20",)}
    given |= {"quantize": quantize, "accept_slower": True}
    archive = pack(**given)
    short, long = (serve(archive, [{"x": np.ones((1, n, 4), np.float32)}])[0] for n in (1, 20))
    np.testing.assert_allclose(short, long, rtol=1e-4)


def test_state_that_a_quantised_program_would_lose_is_refused(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "state.py").write_text(
        "import torch\n\n\nclass State(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.one = torch.nn.Linear(64, 64)\n"
        "        self.last = (torch.zeros(2, 64),)\n\n"
        "    def forward(self, x):\n        self.last = (self.one(x) + 0.5 * self.last[0],)\n"
        "        return self.last[0]\n"
    )
    torch.save(torch.rand(2, 64), tmp_path / "x.pt")
    given: dict[str, Any] = {"model_file": tmp_path / "state.py", "example": tmp_path / "x.pt"}
    with pytest.raises(ModelRefused, match=r"in 'last', .* an exported program keeps the value of packing"):
        pack(**given, model_format="export", quantize="int8-dynamic", accept_slower=True)


def test_other_sizes_vary_together_when_told(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "masked.py").write_text(
        "import torch\n\n\nclass Masked(torch.nn.Module):\n"
        "    def forward(self, ids, mask):\n        return (ids * mask).float().cumsum(1)\n"
    )
    (tmp_path / "x.json").write_text('{"mask": [[1, 1, 0]], "ids": [[5, 6, 7]]}')
    archive = pack(
        model_file=tmp_path / "masked.py",
        model_format="export",
        example=tmp_path / "x.json",
        dynamic_batch="1:8",
        dynamic_sizes=("ids,mask:1=2:16",),
    )
    signature = signature_in(archive)
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [
        ("ids", "INT64", (-1, -1)),
        ("mask", "INT64", (-1, -1)),
    ]
    assert signature.outputs[0].shape == (-1, -1)


def test_an_example_of_the_largest_size_with_indices_is_verified(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text(
        "import torch\n\n\nclass Last(torch.nn.Module):\n"
        "    def forward(self, x, last):\n        return x[torch.arange(len(x)), last]\n"
    )
    torch.save((torch.rand(1, 9, 3), torch.tensor([8])), tmp_path / "x.pt")
    archive = pack(
        model_file=tmp_path / "last.py",
        model_format="torchscript",
        example=tmp_path / "x.pt",
        dynamic_sizes=("x.1=2:9",),
        verify=True,
    )
    assert signature_in(archive).inputs[0].shape == (-1, -1, 3)


def test_a_normalisation_in_bfloat16_is_folded_and_verified(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(
        "import torch\n\n\nclass Normed(torch.nn.Sequential):\n    def __init__(self):\n"
        "        torch.manual_seed(0)\n"
        "        super().__init__(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32))\n"
        "        self[1].running_var.uniform_(0.5, 2)\n        self.bfloat16()\n"
    )
    torch.save(torch.rand(1, 3, 16, 16).bfloat16(), tmp_path / "x.pt")
    given = {"model_file": tmp_path / "normed.py", "example": tmp_path / "x.pt"}
    archive = open_archive(pack(**given, model_format="torchscript", verify=True))
    report = json.loads(archive.read_text("MAR-INF/report.json"))
    assert 0.001 < report["difference"]["drift"] < report["max_drift"] == 4 * 2**-7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"example": None}, "give --example"),
        ({"dynamic_batch": "64:1"}, "--dynamic-batch is '64:1'; expected the least and the largest"),
        ({"dynamic_batch": "8:64"}, "the size of batch in the example is 2; expected one of 8 to 64"),
        ({"dynamic_sizes": ("nothing:1=1:2",)}, "names the input 'nothing'; expected features"),
        ({"dynamic_sizes": ("features=1",)}, r"expected INPUT\[,INPUT\]\.DIMENSION"),
        ({"script": True}, "--script makes TorchScript; expected --format torchscript"),
        ({"isa": "avx2"}, "expected --format aoti"),
        ({"model_format": "keep"}, "eager is not a form that a server loads by itself"),
        ({"factory": "net_module"}, r"expected package\.module:function"),
        ({"factory": "json:loads"}, "calling the factory json:loads without arguments failed"),
        ({"factory": "collections:OrderedDict"}, "returned a OrderedDict; expected a torch.nn.Module"),
        ({"factory": None}, "a state dict, which is numbers without a model; name the model's class"),
        ({"serialized_file": None, "factory": None}, "no model is given"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    forms: Any, pack: Pack, change: dict[str, Any], said: str
) -> None:
    given = {
        **CLASS,
        "serialized_file": forms.file("state.weights"),
        "model_format": "export",
        "example": forms.file("example.npy"),
        **change,
    }
    with pytest.raises(ModelRefused, match=said) as caught:
        pack(**given)
    assert "\n" not in str(caught.value)


MORE_THAN_THE_WEIGHTS = 10_000  # bytes; a file has more than these, as the graph


@pytest.mark.parametrize("model_format", ["torchscript", "export", "aoti", "keep"])
def test_a_disk_that_is_full_is_told_before_anything_is_written(
    forms: Any, pack: Pack, monkeypatch: pytest.MonkeyPatch, model_format: str
) -> None:
    """On a full one torch's writer ends the process."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=MORE_THAN_THE_WEIGHTS))
    model = {"serialized_file": forms.file("numbers.weights"), "model_file": forms.file("net_module.py")}
    with pytest.raises(ModelRefused, match=r"has room for 0 MB; make room there, or .* TMPDIR"):
        pack(**model, model_format=model_format, example=forms.file("example.npy"))


@pytest.mark.parametrize("model_format", ["torchscript", "export", "aoti", "keep"])
def test_a_limit_of_a_files_size_is_told_before_anything_is_written(
    forms: Any, pack: Pack, monkeypatch: pytest.MonkeyPatch, model_format: str
) -> None:
    """At the limit, too, torch's writer ends the process."""
    found = resource.getrlimit
    limits = {resource.RLIMIT_FSIZE: (MORE_THAN_THE_WEIGHTS, MORE_THAN_THE_WEIGHTS)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind) or found(kind))
    model = {"serialized_file": forms.file("numbers.weights"), "model_file": forms.file("net_module.py")}
    with pytest.raises(ModelRefused, match=r"a file of this process may have 0 MB; .* \(ulimit -f\)"):
        pack(**model, model_format=model_format, example=forms.file("example.npy"))
