"""Compiled models: equal to torch's own binding, without the GIL, many runs at once, and substitutes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.handlers.base import BaseHandler
from torchere.handlers.cgroup import CgroupSample
from torchere.handlers.compiled import library as aot_abi
from torchere.handlers.compiled import library as aot_model
from torchere.handlers.compiled import load as aot
from torchere.handlers.compiled import package as aot_gil
from torchere.handlers.compiled.library import AotModel, BoundModel
from torchere.handlers.compiled.package import extracted_library, holds_gil, read_package, read_rules
from torchere.handlers.errors import PredictionException
from torchere.handlers.loading.weights import SharedModels

SCALE = torch.tensor(2.0)
LONG_BATCH = 12_000  # rows: a tenth of a second


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 256, generator=generator), torch.tensor([3])


def load(directory: Path) -> Any:
    return aot.load_package(str(directory / "probe.pt2"), str(directory), "cpu")


@pytest.fixture
def library(probe_archive: Path) -> str:
    return str(extracted_library(read_package(str(probe_archive / "probe.pt2")), probe_archive / ".aot"))


def test_results_have_the_modules_structure_and_equal_the_official_bindings(
    probe_archive: Path, library: str
) -> None:
    model = load(probe_archive)
    official = aot_abi.official_runner(library)
    for rows in (1, 2, 33):  # the first run is the one that is tested
        x, count = batch(rows)
        with torch.inference_mode():
            found = model(x, count, scale=SCALE)
        y, plus_one, sums = official.run([x, count, SCALE])
        assert torch.equal(found["y"], y)
        assert torch.equal(found["pair"][0], plus_one)
        assert torch.equal(found["pair"][1], sums)
        assert not found["y"].requires_grad


def test_as_many_runs_at_once_as_the_container_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("torchere.handlers.cgroup.sample_cgroup", lambda _: CgroupSample(cpu_limit_cores=2.5))
    monkeypatch.setattr("torchere.handlers.compiled.load.AotModel", lambda path, runs, rules: runs)
    assert aot.load_shared_object("model.so", "cpu") == 3


def test_other_threads_go_on_while_it_runs(probe_archive: Path) -> None:
    model = load(probe_archive)
    x, count = batch(LONG_BATCH)
    model(*batch(1), scale=SCALE)
    ticks, over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = ticks
    model(x, count, scale=SCALE)
    during = ticks - before
    over.set()
    ticker.join()
    assert during > 20  # one or two while the GIL is held


def test_several_threads_are_inside_at_the_same_time(probe_archive: Path) -> None:
    model = load(probe_archive)
    expected = model(*batch(LONG_BATCH), scale=SCALE)["y"]
    spans: list[tuple[float, float]] = []
    right: list[bool] = []
    start = threading.Barrier(4)

    def run() -> None:
        inputs = batch(LONG_BATCH)
        start.wait()
        began = time.perf_counter()
        found = model(*inputs, scale=SCALE)["y"]
        spans.append((began, time.perf_counter()))
        right.append(torch.allclose(found, expected, rtol=1e-4, atol=1e-4))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4
    assert max(began for began, _ in spans) < min(ended for _, ended in spans)


def test_a_wrong_shape_type_or_count_is_refused_before_memory_is_read(probe_archive: Path) -> None:
    model = load(probe_archive)
    x, count = batch(2)
    with pytest.raises(RuntimeError, match="unmatched dim value"):
        model(x[:, :100].contiguous(), count, scale=SCALE)
    with pytest.raises(RuntimeError, match="unmatched dtype"):
        model(x.double(), count, scale=SCALE)
    with pytest.raises(ValueError, match="takes 3 tensors, and got 2"):
        model(x, scale=SCALE)
    with pytest.raises(ValueError, match="takes the keywords"):
        model(x, count, factor=SCALE)
    assert model(x, count, scale=SCALE)["y"].shape == (2, 256)


def bound_below(directory: Path) -> None:
    """Give the package's source the lower bound that torch writes by default: then it checks nothing."""
    with zipfile.ZipFile(directory / "probe.pt2") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(directory / "probe.pt2", "w") as file:
        for name, content in entries.items():
            lower = re.sub(rb"(if \(\w+_size\[0\]) > 100000\)", rb"\1 < 2) {}\n\g<0>", content)
            file.writestr(name, lower if name.endswith("wrapper.cpp") else content)


@pytest.mark.parametrize("by_binding", [False, True])
def test_a_package_compiled_by_default_has_its_inputs_checked_for_it(
    probe_archive: Path, monkeypatch: pytest.MonkeyPatch, by_binding: bool
) -> None:
    bound_below(probe_archive)
    monkeypatch.setattr(aot_abi, "available", lambda: not by_binding)
    model = load(probe_archive)
    x, count = batch(2)
    for _ in range(2):  # the first run and another
        assert model(x, count, scale=SCALE)["y"].shape == (2, 256)
        assert model(x[:1], count, scale=SCALE)["y"].shape == (1, 256)
    refused = {
        r"found the shape \[2, 100\], expected \[1 to 100000, 256\]": x[:, :100].contiguous(),
        r"found the shape \[512\]": x.flatten(),
        r"found the shape \[100001, 256\]": torch.zeros(1, 1).expand(100_001, 256),
        "found the type int64, expected float32": x.long(),
        r"found the shape \[0, 256\]": x[:0],
    }
    for reason, wrong in refused.items():
        with pytest.raises(PredictionException, match=reason) as info:
            model(wrong, count, scale=SCALE)
        assert info.value.error_code == 400
    with pytest.raises(ValueError, match=r"found the strides \[1, 2\], expected 256 at dimension 0"):
        model(x.t().contiguous().t(), count, scale=SCALE)


DERIVED_SCRIPT = """
import sys, torch

class Doubled(torch.nn.Module):
    def forward(self, x, y, z):
        return torch.cat([x, x]) + y + torch.cat([z, z])

rows, columns = torch.export.Dim("b"), torch.export.Dim("c")
example = tuple(torch.zeros(count, 8) for count in (3, 6, 3))
sizes = tuple({0: count, 1: columns} for count in (rows, 2 * rows, rows))
program = torch.export.export(Doubled(), example, dynamic_shapes=sizes)
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
"""


@pytest.fixture(scope="module")
def derived_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package compiled with torch's defaults, for inputs of b, 2*b and b rows of c, which it adds."""
    if shutil.which("g++") is None:
        pytest.skip("this needs g++")
    path = tmp_path_factory.mktemp("derived") / "net.pt2"
    subprocess.run([sys.executable, "-c", DERIVED_SCRIPT, str(path)], check=True, capture_output=True)
    if not any(rule.sizes for rule in read_rules(read_package(str(path))) or ()):
        pytest.skip("this needs a torch that writes the sizes of inputs into the source")
    return path


@pytest.mark.parametrize("by_binding", [False, True])
def test_sizes_of_several_inputs_are_compared(
    derived_sizes: Path, monkeypatch: pytest.MonkeyPatch, by_binding: bool
) -> None:
    monkeypatch.setattr(aot_abi, "available", lambda: not by_binding)
    model = aot.load_package(str(derived_sizes), str(derived_sizes.parent), "cpu")
    for rows in (1, 3):
        x, y, z = (torch.rand(count, 8) for count in (rows, 2 * rows, rows))
        torch.testing.assert_close(model(x, y, z), torch.cat([x, x]) + y + torch.cat([z, z]))
    for counts, reason in {
        (4, 6, 4): "input 1 of the compiled model: found the size 6 at dimension 0, expected 8",
        (3, 7, 3): "input 1 of the compiled model: found the size 7 at dimension 0, expected 6",
        (3, 6, 1): "input 2 of the compiled model: found the size 1 at dimension 0, expected 3",
    }.items():
        with pytest.raises(PredictionException, match=reason) as info:
            model(*(torch.rand(count, 8) for count in counts))
        assert info.value.error_code == 400


def test_strides_that_follow_from_a_size_are_compared(derived_sizes: Path) -> None:
    model = aot.load_package(str(derived_sizes), str(derived_sizes.parent), "cpu")
    x, y = torch.rand(3, 8), torch.rand(6, 4)
    torch.testing.assert_close(model(x[:1, :4], y[:2], x[:1, 4:]), x[:1, :4] + x[:1, 4:] + y[:2])
    for wrong, found in {x[:, :4]: 8, x[:1, :4].expand(3, 4): 0}.items():
        with pytest.raises(ValueError, match=rf"input 0 .* strides \[{found}, 1\], expected 4 at"):
            model(wrong, y, torch.rand(3, 4))


def test_torchs_own_binding_has_the_code_check_its_inputs(
    probe_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot_abi, "available", lambda: False)
    model = load(probe_archive)
    x, count = batch(2)
    assert model(x, count, scale=SCALE)["y"].shape == (2, 256)
    with pytest.raises(RuntimeError):
        model(x, count.int(), scale=SCALE)
    assert model.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"


WEIGHTS_SCRIPT = """
import sys, torch
from torchere.archiver.models.convert import aotinductor

module = torch.nn.PReLU(64).eval()
module.weight.data = torch.arange(64.0)  # few or equal numbers would be written into the code
program = torch.export.export(module, (torch.zeros(1, 64),))
options = aotinductor._settings(None, freezing=False) | {"aot_inductor.package_constants_in_so": False}
options["aot_inductor.package_constants_on_disk_format"] = "pickle_weights"
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1], inductor_configs=options)
"""


@pytest.fixture(scope="module")
def weights_apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that multiplies negative numbers by 0 to 63, which are in a file beside the library."""
    from torch._inductor import config  # seconds

    if not hasattr(config.aot_inductor, "package_constants_on_disk_format") or shutil.which("g++") is None:
        pytest.skip("this needs g++, and a torch that writes weights as files")
    path = tmp_path_factory.mktemp("apart") / "net.pt2"
    subprocess.run([sys.executable, "-c", WEIGHTS_SCRIPT, str(path)], check=True, capture_output=True)
    return path


def test_weights_in_separate_files_are_loaded(weights_apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = aot.load_package(str(weights_apart), str(weights_apart.parent), "cpu")
    assert torch.equal(model(torch.full((1, 64), -1.0)), -torch.arange(64.0)[None])
    monkeypatch.setattr("torch.export.pt2_archive._package.load_pt2", lambda path: None)  # an older torch's
    with pytest.raises(RuntimeError, match=r"weights in separate files, which torch .* can't load"):
        aot.load_package(str(weights_apart), str(weights_apart.parent), "cpu")


def test_a_package_without_its_weights_is_refused(weights_apart: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(weights_apart) as file, zipfile.ZipFile(tmp_path / "net.pt2", "w") as bare:
        for name in file.namelist():
            if "weight" not in name:
                bare.writestr(name, file.read(name))
    with pytest.raises(RuntimeError, match="can't run here: it was compiled without its weights"):
        aot.load_package(str(tmp_path / "net.pt2"), str(tmp_path), "cpu")


def test_what_has_no_elements_is_refused_before_the_code_divides_by_its_size(probe_archive: Path) -> None:
    model = load(probe_archive)
    x, count = batch(1)
    with pytest.raises(PredictionException, match=r"found the shape \[0, .*expected at least one") as info:
        model(x[:0], count, scale=SCALE)
    assert info.value.error_code == 400
    assert model(x, count, scale=SCALE)["y"].shape[0] == 1


def test_a_difference_to_the_official_binding_is_logged_and_that_is_used(
    library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other:
        def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensors[0] + 100, tensors[1], tensors[0].sum(dim=1)]

    caplog.set_level("WARNING")  # whatever tests before this one left
    monkeypatch.setattr(aot_model, "official_runner", lambda path: Other())
    model = AotModel(library, 2)
    x, count = batch(2)
    assert torch.equal(model(x, count, scale=SCALE)["y"], x + 100)
    assert torch.equal(model(x, count, scale=SCALE)["y"], x + 100)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "isolation: process" in caplog.text


def test_a_torch_without_the_private_functions_runs_the_official_binding(
    probe_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot_abi, "available", lambda: False)
    monkeypatch.setattr(aot_gil, "HANDLE_FUNCTIONS", ("of_another_torch",))
    assert isinstance(load(probe_archive), BoundModel)
    assert holds_gil(str(probe_archive / "probe.pt2"), str(probe_archive))


def test_a_library_without_the_abi_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"other\.so can't be opened"):
        aot_abi.CompiledLibrary(str(tmp_path / "other.so"), 1)
    stranger = next(Path(torch.__file__).parent.joinpath("lib").glob("libc10.so*"))
    with pytest.raises(aot_abi.AbiMismatch, match="lacks AOTInductorModelContainerCreateWithDevice"):
        aot_abi.CompiledLibrary(str(stranger), 1)


def test_a_bare_library_runs_the_same_way_with_a_warning_that_nothing_is_checked(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = aot.load_shared_object(library, None)
    assert isinstance(model, AotModel)
    assert "a bare library is not told to check its inputs" in caplog.text
    assert model(*batch(2), scale=SCALE)["y"].shape == (2, 256)


def test_a_package_that_does_not_fit_is_replaced_by_its_fallback(
    probe_archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(probe_archive)(*batch(2), scale=SCALE)["y"]
    record = {"torch": "1.0.0", "fallback": "probe.exported.pt2"}
    (probe_archive / "MAR-INF").mkdir()
    (probe_archive / "MAR-INF" / "build.json").write_text(json.dumps(record))
    model = load(probe_archive)
    assert isinstance(model, torch.nn.Module)
    assert torch.allclose(model(*batch(2), scale=SCALE)["y"], expected, atol=1e-4)
    assert "compiled with torch 1.0.0" in caplog.text
    assert holds_gil(str(probe_archive / "probe.pt2"), str(probe_archive))


def test_an_older_torch_without_a_fallback_is_tried(
    probe_archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (probe_archive / "MAR-INF").mkdir()
    (probe_archive / "MAR-INF" / "build.json").write_text('{"torch": "1.0.0"}')
    assert isinstance(load(probe_archive), AotModel)
    assert "tried nevertheless" in caplog.text


@pytest.mark.parametrize("version", [torch.__version__.partition("+")[0], "1.0.0"])
def test_weights_in_another_order_are_refused_whatever_torch_compiled_it(
    probe_archive: Path, version: str
) -> None:
    (probe_archive / "MAR-INF").mkdir()
    record = {"torch": version, "weights_for": "another"}
    (probe_archive / "MAR-INF" / "build.json").write_text(json.dumps(record))
    with pytest.raises(RuntimeError, match="its weights of 4 bits are ordered for another"):
        load(probe_archive)


def test_a_cpu_that_lacks_an_instruction_set_is_refused_without_a_fallback(
    probe_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (probe_archive / "MAR-INF").mkdir()
    (probe_archive / "MAR-INF" / "build.json").write_text('{"isa": "avx512"}')
    monkeypatch.setattr(aot, "read_cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(RuntimeError, match="this CPU lacks avx512bw"):
        load(probe_archive)


def test_code_for_a_gpu_is_not_run_on_the_cpu_but_its_fallback_is(probe_archive: Path) -> None:
    expected = load(probe_archive)(*batch(2), scale=SCALE)["y"]
    with zipfile.ZipFile(probe_archive / "probe.pt2") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(probe_archive / "probe.pt2", "w") as file:
        for name, content in entries.items():
            file.writestr(name, content.replace(b'"AOTI_DEVICE_KEY": "cpu"', b'"AOTI_DEVICE_KEY": "cuda"'))
    with pytest.raises(RuntimeError, match="can't run here: it was compiled for cuda, and is to run on cpu"):
        load(probe_archive)
    (probe_archive / "MAR-INF").mkdir()
    (probe_archive / "MAR-INF" / "build.json").write_text('{"fallback": "probe.exported.pt2"}')
    assert torch.allclose(load(probe_archive)(*batch(2), scale=SCALE)["y"], expected, atol=1e-4)


def test_the_compiled_package_leaves_the_gil_and_the_program_does_not(probe_dir: Path) -> None:
    assert not holds_gil(str(probe_dir / "probe.pt2"), str(probe_dir))
    assert holds_gil(str(probe_dir / "probe.exported.pt2"), str(probe_dir))
    assert not holds_gil(str(probe_dir / "none.pt2"), str(probe_dir))


def test_handlers_of_one_version_share_it_and_its_library_is_written_once(
    probe_archive: Path, make_context: Callable[..., Any]
) -> None:
    shared = SharedModels()
    model = {"serializedFile": "probe.pt2"}
    context = make_context(probe_archive, model=model, shared_models=shared)
    first, second = BaseHandler(), BaseHandler()
    first.initialize(context)
    second.initialize(context)
    assert first.model is second.model
    assert [item.suffix for item in (probe_archive / ".aot").iterdir()] == [".so"]


def test_a_read_only_archive_is_no_hindrance(
    probe_archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (probe_archive / ".aot").write_text("a file where the folder should be")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert load(probe_archive)(*batch(1), scale=SCALE)["y"].shape == (1, 256)
    assert len(list(tmp_path.glob("torchere-aot-*/*.so"))) == 1
