"""`torchere archive` and `torchere convert` as commands: flags, exit codes, one clear line."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.quantization import METHODS
from torchere.archiver.request import BUILT_IN_HANDLERS
from torchere.archiver.signature import Limit, parse
from torchere.serving.commands.cli import main

Command = Callable[..., int]


@pytest.fixture
def archive_of(forms: Any, tmp_path: Path) -> Callable[..., int]:
    """Runs `torchere archive` for the state dict and its class, with more arguments."""

    def run(*arguments: object) -> int:
        given = [
            "archive",
            "--model-name=net",
            f"--export-path={tmp_path}",
            "--no-verify",
            *map(str, arguments),
        ]
        return main(given)

    return run


def test_archive_tells_its_steps_and_what_the_model_takes(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    status = archive_of(
        f"--model-file={forms.file('net_module.py')}",
        f"--serialized-file={forms.file('state.weights')}",
        "--format=torchscript",
        f"--example={forms.file('example.npy')}",
    )
    said = capsys.readouterr().err
    assert status == 0, said
    assert "tracing and freezing ..." in said
    assert "in: features FP32[-1, 8]" in said
    manifest = open_archive(tmp_path / "net.mar").manifest
    assert (manifest.handler, manifest.serialized_file, manifest.model_version) == (
        "tensor",
        "model.pt",
        "1.0",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--serialized-file={cut}", "--format=export"), "damaged zip"),
        (("--serialized-file={whole}", "--format=export"), "more than tensors"),
        (("--serialized-file={state}",), "name the model's class too"),
        (("--serialized-file={script}",), "'tensor', the default, needs signature.json"),
        (("--serialized-file={script}", "--example={cut}"), "no example that can be read"),
        ((), "no model is given"),
    ],
)
def test_what_is_refused_exits_with_2_and_one_line(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any, *, arguments: tuple[str, ...], said: str
) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(forms.file("script.model").read_bytes()[:500])
    files = {"cut": cut, "whole": forms.file("whole.weights")}
    files |= {"state": forms.file("state.weights"), "script": forms.file("script.model")}
    assert archive_of(*[argument.format(**files) for argument in arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("torchere archive: ")
    assert said in last
    assert not (tmp_path / "net.mar").exists()


def test_a_model_file_that_ends_the_process_exits_with_2_and_one_line(
    archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "ending.py").write_text("import sys\n\nsys.exit(0)\n")
    assert archive_of(f"--model-file={tmp_path}/ending.py", "--format=torchscript") == 2
    assert "importing the model file failed: it ends the process" in capsys.readouterr().err.splitlines()[-1]


def test_a_handler_that_ends_the_process_exits_with_2_and_one_line(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "ending.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    status = archive_of(
        f"--model-file={forms.file('net_module.py')}",
        f"--serialized-file={forms.file('state.weights')}",
        "--format=torchscript",
        f"--handler={tmp_path}/ending.py",
        f"--example={tmp_path}/photo.png",
    )
    assert status == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "photo.png: preparing it by the handler failed: it ends the process" in said


def test_a_missing_file_and_an_existing_archive_exit_with_1(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    assert archive_of("--serialized-file=gone.pt", "--format=export") == 1
    assert capsys.readouterr().err.startswith("torchere archive: --serialized-file gone.pt: no such file in ")
    (tmp_path / "net.mar").write_text("")
    script = f"--serialized-file={forms.file('script.model')}"
    assert archive_of(script, f"--example={forms.file('example.npy')}") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"torchere archive: {tmp_path}/net.mar already exists")  # before any step


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--handler=nonexist", "--handler nonexist: there is no file nonexist.py in "),
        ("--extra-files=gone", "--extra-files gone: no such file or folder in "),
        ("--config-file=gone.yaml", "--config-file gone.yaml: no such file in "),
    ],
)
@pytest.mark.parametrize("build", [(), ("--format=torchscript",)], ids=["packed", "built"])
def test_what_is_not_there_is_one_line_before_any_step(
    forms: Any, archive_of: Command, capsys: Any, *, build: tuple[str, ...], wrong: str, said: str
) -> None:
    script = f"--serialized-file={forms.file('script.model')}"
    assert archive_of(script, "--handler=base_handler", *build, wrong) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"torchere archive: {said}")


@pytest.mark.parametrize("flag", ["--example", "--samples"])
def test_an_example_that_is_not_there_is_one_line_before_any_step(
    forms: Any, archive_of: Command, capsys: Any, flag: str
) -> None:
    script = f"--serialized-file={forms.file('script.model')}"
    assert archive_of(script, "--format=torchscript", f"{flag}=gone.npy") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchere archive: {flag} gone.npy: no such file or folder in ")


def test_an_unknown_method_is_told_before_an_example_is_asked_for(
    forms: Any, archive_of: Command, capsys: Any
) -> None:
    assert archive_of(f"--serialized-file={forms.file('script.model')}", "--quantize=int9") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchere archive: --quantize is 'int9'; expected one of int8-static, ")


def test_static_int8_without_samples_is_told_before_any_step(
    forms: Any, archive_of: Command, capsys: Any
) -> None:
    flags = (f"--serialized-file={forms.file('state.weights')}", "--factory=net_module:net")
    assert archive_of(*flags, f"--example={forms.file('example.npy')}", "--quantize=int8-static") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchere archive: int8-static needs samples ")


def script_to_serve(forms: Any, folder: Path) -> str:
    """The flag for TorchScript under the suffix by which a server knows it."""
    path = folder / "script.pt"
    path.write_bytes(forms.file("script.model").read_bytes())
    return f"--serialized-file={path}"


def test_a_signature_among_the_extra_files_is_as_good_as_an_example(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    script = script_to_serve(forms, tmp_path)
    assert archive_of(script) == 2
    assert "'tensor', the default, needs signature.json: give --example with" in capsys.readouterr().err
    given = forms.file("example.npy")
    assert not archive_of(script, f"--example={given}")
    signature = open_archive(tmp_path / "net.mar").read_text("signature.json")
    (tmp_path / "signature.json").write_text(signature)
    assert not archive_of(script, f"--extra-files={tmp_path / 'signature.json'}", "--force")
    opened = open_archive(tmp_path / "net.mar")
    assert (opened.manifest.handler, opened.read_text("signature.json")) == ("tensor", signature)


def test_convert_finds_an_existing_output_and_a_missing_handler_before_any_step(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    assert not archive_of(script_to_serve(forms, tmp_path), "--handler=base_handler")
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    new.write_text("")
    arguments = ["convert", str(old), "--to=export", "-o", str(new), "--no-verify"]
    capsys.readouterr()
    assert main([*arguments, f"--example={forms.file('example.npy')}"]) == 1
    assert capsys.readouterr().err.startswith(f"torchere convert: {new} already exists")
    assert main([*arguments, "--force", "--handler=nonexist"]) == 1
    assert capsys.readouterr().err.startswith("torchere convert: --handler nonexist: there is no file ")


def test_convert_brings_an_archive_to_another_format_and_keeps_the_rest(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "index_to_name.json").write_text('{"0": "cat"}')
    (tmp_path / "model-config.yaml").write_text("minWorkers: 1\n")
    assert not archive_of(
        f"--serialized-file={forms.file('script.model')}",
        f"--example={forms.file('example.npy')}",
        f"--extra-files={tmp_path}/index_to_name.json",
        f"--config-file={tmp_path}/model-config.yaml",
        "--version=2.5",
    )
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    arguments = ["convert", str(old), "--to=export", "--dynamic-batch=1:16", "-o", str(new), "--no-verify"]
    assert main(arguments) == 0, capsys.readouterr().err
    opened = open_archive(new)
    assert {entry.name for entry in opened.entries} == {
        *("MAR-INF/MANIFEST.json", "MAR-INF/build.json", "signature.json"),
        *("index_to_name.json", "model-config.yaml", "model.pt2"),
    }
    manifest = opened.manifest
    assert (manifest.model_version, manifest.handler, manifest.config_file) == (
        "2.5",
        "tensor",
        "model-config.yaml",
    )
    assert json.loads(opened.read_text("MAR-INF/build.json"))["format"] == "export"
    assert parse(opened.read_text("signature.json")).batched


@pytest.mark.parametrize("place", [".", "{here}"], ids=["relative", "absolute"])
def test_convert_takes_the_users_handler_in_place_of_the_archives_of_that_name(
    forms: Any,
    archive_of: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    *,
    place: str,
) -> None:
    handler, here = "def handle(data, context):\n    return data\n", tmp_path / "here"
    here.mkdir()
    (tmp_path / "service.py").write_text(handler)
    (here / "service.py").write_text(f"# edited\n{handler}")
    assert not archive_of(script_to_serve(forms, tmp_path), f"--handler={tmp_path}/service.py")
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    arguments = ["convert", str(old), "--to=export", "-o", str(new), "--no-verify", "--force"]
    arguments += [f"--example={forms.file('example.npy')}"]
    monkeypatch.chdir(here)
    named = f"--handler={place.format(here=here)}/service.py"
    assert main([*arguments, named]) == 0, capsys.readouterr().err
    assert open_archive(new).read_text("service.py").startswith("# edited")
    assert open_archive(new).manifest.handler == "service.py"
    (here / "service.py").unlink()
    assert main([*arguments, "--handler=service.py"]) == 0, capsys.readouterr().err  # the archive's
    assert open_archive(new).read_text("service.py") == handler


def test_convert_keeps_a_handler_in_cpp(forms: Any, archive_of: Command, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "libh.so").write_bytes(b"\x7fELF")
    example = f"--example={forms.file('example.npy')}"
    handler = (f"--handler={tmp_path}/libh:H", "--runtime=LSP")
    assert not archive_of(script_to_serve(forms, tmp_path), example, *handler)
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    assert main(["convert", str(old), "--to=export", "-o", str(new), "--no-verify", example]) == 0
    opened = open_archive(new)
    assert (opened.manifest.handler, opened.manifest.runtime) == ("libh:H", "LSP")
    assert "libh.so" in {entry.name for entry in opened.entries}
    capsys.readouterr()
    assert main(["inspect", str(new)]) == 0
    assert "handler: libh:H (machine code in libh.so)" in capsys.readouterr().out


def test_convert_keeps_all_other_files_in_their_place(forms: Any, tmp_path: Path, capsys: Any) -> None:
    old, new = tmp_path / "old.mar", tmp_path / "new.mar"
    model = {"modelName": "net", "modelVersion": "1.0", "handler": "code/handler.py:run"}
    model |= {"serializedFile": "weights/net.pt", "requirementsFile": "code/requirements.txt"}
    kept = {
        "code/handler.py": "import helper\n\ndef run(data, context):\n    return data\n",
        "code/helper.py": "",
        "code/requirements.txt": "",
        ".assets/words [1].txt": "words",
    }
    with zipfile.ZipFile(old, "w") as archive:
        for name, text in kept.items():
            archive.writestr(name, text)
        archive.write(forms.file("script.model"), "weights/net.pt")
        archive.writestr("MAR-INF/notes.txt", "of the old archive")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    arguments = ["convert", str(old), "--to=torchscript", "-o", str(new), "--no-verify"]
    assert main([*arguments, f"--example={forms.file('example.npy')}"]) == 0, capsys.readouterr().err
    opened = open_archive(new)
    names = {entry.name for entry in opened.entries}
    assert names == {*kept, "model.pt", "signature.json", "MAR-INF/MANIFEST.json", "MAR-INF/build.json"}
    manifest = opened.manifest
    assert (manifest.handler, manifest.requirements_file) == ("code/handler.py:run", "code/requirements.txt")


class Doubled(torch.nn.Module):
    """Multiplies no matrices: AOTInductor compiles it once, and measures no second build."""

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": features * 2, "hidden": features.sum(-1)}


@pytest.mark.parametrize("formats", [("export", "torchscript"), ("export", "export"), ("aoti", "aoti")])
def test_convert_takes_its_own_archives_and_keeps_the_names_of_their_inputs(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any, formats: tuple[str, str]
) -> None:
    before, after = formats
    example = f"--example={forms.file('example.npy')}"
    script = f"--serialized-file={forms.file('script.model')}"
    if before == "aoti":
        torch.jit.script(Doubled()).save(str(tmp_path / "doubled.pt"))
        script = f"--serialized-file={tmp_path / 'doubled.pt'}"
    assert not archive_of(script, example, f"--format={before}", "--dynamic-batch=1:8", "--no-verify")
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    assert main(["convert", str(old), f"--to={after}", "-o", str(new)]) == 0, capsys.readouterr().err
    was, now = (parse(open_archive(path).read_text("signature.json")) for path in (old, new))
    assert (now.inputs, now.outputs) == (was.inputs, was.outputs)
    assert json.loads(open_archive(new).read_text("MAR-INF/build.json"))["format"] == after


def test_convert_keeps_a_free_batch_of_the_signature_that_the_example_is_made_of(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    example = f"--example={forms.file('example.npy')}"
    assert not archive_of(f"--serialized-file={forms.file('script.model')}", example)
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    arguments = ["convert", str(old), "--to=export", "-o", str(new), "--no-verify", "--force"]
    assert main(arguments) == 0
    told = "varying, since the archive's signature leaves it free: features.0=1:64; --dynamic changes that"
    assert told in capsys.readouterr().err
    was, now = (parse(open_archive(path).read_text("signature.json")) for path in (old, new))
    assert [spec.shape for spec in now.inputs] == [spec.shape for spec in was.inputs]
    assert now.batched
    for given in (example, "--dynamic-batch=1:8", "--dynamic=features.0=1:128"):
        assert main([*arguments, given]) == 0
        assert "since the archive's signature" not in capsys.readouterr().err
    (spec,) = parse(open_archive(new).read_text("signature.json")).inputs
    assert spec.limits == (Limit(0, most=128),)


class Masked(torch.nn.Module):
    """Masks ids; both inputs have one length."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids * mask


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ("--dynamic-batch=1:8", (8, 16)),
        ("--dynamic=ids,mask.1=2:8", (64, 8)),
        ("--dynamic-batch=4:8", (8, 16)),  # the made-up example has sizes of the range
        ("--dynamic=ids,mask.1=4:8", (64, 8)),
    ],
)
def test_convert_keeps_the_free_sizes_of_a_program_that_no_option_names(
    archive_of: Command, tmp_path: Path, capsys: Any, *, given: str, most: tuple[int, int]
) -> None:
    torch.jit.script(Masked()).save(str(tmp_path / "masked.pt"))
    torch.save({name: torch.ones(2, 3) for name in ("ids", "mask")}, tmp_path / "example.pt")
    packed = (f"--serialized-file={tmp_path}/masked.pt", f"--example={tmp_path}/example.pt")
    sizes = ("--dynamic=ids,mask.1=2:16", "--dynamic-batch=1:64")
    assert not archive_of(*packed, *sizes, "--format=export"), capsys.readouterr().err
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    assert main(["convert", str(old), "--to=export", given, "-o", str(new), "--no-verify"]) == 0
    for spec in parse(open_archive(new).read_text("signature.json")).inputs:
        assert spec.shape == (-1, -1)
        assert tuple(limit.most for limit in sorted(spec.limits, key=lambda one: one.dimension)) == most


class Quads(torch.nn.Module):
    """Takes rows in fours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 4, x.shape[1]).reshape(x.shape)


def test_convert_keeps_a_batch_in_multiples(archive_of: Command, tmp_path: Path, capsys: Any) -> None:
    torch.jit.script(Quads()).save(str(tmp_path / "quads.pt"))
    torch.save(torch.rand(4, 3), tmp_path / "x.pt")
    packed = (f"--serialized-file={tmp_path}/quads.pt", f"--example={tmp_path}/x.pt")
    assert not archive_of(*packed, "--dynamic-batch=4*k"), capsys.readouterr().err
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    assert main(["convert", str(old), "--to=torchscript", "-o", str(new), "--no-verify"]) == 0
    was, now = (parse(open_archive(path).read_text("signature.json")) for path in (old, new))
    assert now.batched
    assert now == was


class Distances(torch.nn.Module):
    """Takes any two counts of points."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[:, None] - y).square().sum(-1)


class Pairs(torch.nn.Module):
    """Takes two clouds of as many points each."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y) / (x - y).norm()


@pytest.mark.parametrize(
    ("module", "sizes", "counts", "limits"),
    [
        (Distances(), ("x.0=1:", "y.0=1:"), (4, 6), ()),
        (Pairs(), ("x,y.0=3:",), (5, 5), (Limit(0, least=3, name="x_0"),)),
    ],
)
def test_convert_keeps_first_dimensions_that_are_no_batch_apart_or_together(
    archive_of: Command,
    tmp_path: Path,
    capsys: Any,
    *,
    module: torch.nn.Module,
    sizes: tuple[str, ...],
    counts: tuple[int, int],
    limits: tuple[Limit, ...],
) -> None:
    torch.jit.script(module).save(str(tmp_path / "points.pt"))
    torch.save({name: torch.rand(3, 3) for name in ("x", "y")}, tmp_path / "example.pt")
    packed = (f"--serialized-file={tmp_path}/points.pt", f"--example={tmp_path}/example.pt")
    options = [f"--dynamic={size}" for size in sizes]
    assert not archive_of(*packed, *options, "--format=torchscript"), capsys.readouterr().err
    old, new = tmp_path / "net.mar", tmp_path / "new.mar"
    assert main(["convert", str(old), "--to=export", "-o", str(new), "--no-verify"]) == 0
    was, now = (parse(open_archive(path).read_text("signature.json")) for path in (old, new))
    assert [spec.limits for spec in was.inputs] == [limits] * 2
    assert (now.inputs, now.one_by_one) == (was.inputs, True)
    program = torch.export.load(open_archive(new).extract(tmp_path / "new") / "model.pt2").module()
    given = [torch.rand(count, 3) for count in counts]
    torch.testing.assert_close(program(*given), module(*given))


def test_convert_takes_an_archive_without_a_signature_with_an_example_only(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    assert not archive_of(script_to_serve(forms, tmp_path), "--handler=base_handler")
    new = tmp_path / "new.mar"
    arguments = ["convert", f"{tmp_path}/net.mar", "--to=export", "--dynamic-batch=1:64", "-o", str(new)]
    assert main([*arguments, "--no-verify"]) == 2
    assert "give --example with inputs" in capsys.readouterr().err
    assert main([*arguments, "--no-verify", f"--example={forms.file('example.npy')}"]) == 0
    assert open_archive(new).manifest.serialized_file == "model.pt2"


def test_convert_runs_the_code_of_an_archive_only_when_told(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "service.py").write_text("def handle(data, context):\n    return data\n")
    sign = tmp_path / "ran"
    model = tmp_path / "model.py"
    model.write_text(forms.file("net_module.py").read_text() + f"\nopen({str(sign)!r}, 'w').close()\n")
    torch.save(forms.module.state_dict(), tmp_path / "net.pth")
    assert not archive_of(
        f"--model-file={model}", f"--serialized-file={tmp_path}/net.pth", f"--handler={tmp_path}/service.py"
    )
    arguments = ["convert", f"{tmp_path}/net.mar", "--to=torchscript", "-o", f"{tmp_path}/new.mar"]
    arguments += [f"--example={forms.file('example.npy')}", "--no-verify"]
    assert main(arguments) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert not sign.exists()
    assert main([*arguments, "--allow-code"]) == 0
    manifest = open_archive(tmp_path / "new.mar").manifest
    assert (manifest.handler, manifest.model_file, manifest.serialized_file) == (
        "service.py",
        None,
        "model.pt",
    )
    assert sign.exists()


def test_convert_refuses_a_damaged_archive_with_2(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "old.mar").write_bytes(b"PK\3\4 nonsense")
    assert main(["convert", f"{tmp_path}/old.mar", "--to=export", "-o", f"{tmp_path}/new.mar"]) == 2
    assert capsys.readouterr().err.startswith("torchere convert: ")


def test_inspect_says_what_a_pickle_imports(
    forms: Any, archive_of: Command, tmp_path: Path, capsys: Any
) -> None:
    whole = tmp_path / "whole.pt"
    whole.write_bytes(forms.file("whole.weights").read_bytes())
    assert archive_of(f"--serialized-file={whole}", "--handler=base_handler") == 1  # it would not load
    (tmp_path / "service.py").write_text("def handle(data, context):\n    return data\n")
    assert not archive_of(f"--serialized-file={whole}", f"--handler={tmp_path}/service.py")
    capsys.readouterr()
    assert main(["inspect", f"{tmp_path}/net.mar"]) == 0
    assert "it imports net_module.Net" in capsys.readouterr().out


def help_of(command: str, capsys: Any) -> str:
    """What `--help` prints, on one line."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["archive", "convert"])
def test_help_tells_handlers_methods_and_the_drift_that_is_allowed(command: str, capsys: Any) -> None:
    said = help_of(command, capsys)
    assert ", ".join(BUILT_IN_HANDLERS) in said
    methods = said.partition("--quantize METHOD ")[2].partition(" --samples PATH")[0]
    assert all(f"{method}: " in methods for method in METHODS)
    limits = said.partition("drift further (default: ")[2].partition(")")[0]
    for name, method in METHODS.items():
        named = next(part for part in limits.split("; ") if f" {name}," in f"{part},")
        assert named.startswith(f"{method.max_drift} with --quantize ")
    assert limits.endswith("; 0.001 without --quantize, more for weights in 16 bits")


@pytest.mark.parametrize("command", ["archive", "convert"])
def test_force_only_overwrites_and_a_drift_is_accepted_by_a_flag_of_its_own(
    command: str, capsys: Any
) -> None:
    said = help_of(command, capsys)
    assert "--force overwrite an existing archive -" in said
    assert "--accept-drift pack the model even if it differs too much from the original" in said


@pytest.mark.parametrize("command", [["archive", "--model-name", "net"], ["convert", "a.mar", "-o", "b.mar"]])
@pytest.mark.parametrize("version", ["1/2", "", "a\nb", "1" * 256])
def test_a_version_that_no_server_takes_is_told_before_any_step(
    command: list[str], version: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, f"--version={version}"])
    assert end.value.code == 2
    assert "expected 1 to 255 printable characters without '/'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["archive", "--model-name", "net"], ["compare", "a.mar", "b.mar"]])
@pytest.mark.parametrize("given", ["nan", "-0.1", "inf", "much"])
def test_a_drift_that_is_no_limit_is_told_before_any_step(
    command: list[str], given: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, f"--max-drift={given}"])
    assert end.value.code == 2
    assert f"--max-drift: '{given}'; expected a number, 0 or more" in capsys.readouterr().err


def test_help_of_archive_tells_the_defaults(capsys: Any) -> None:
    said = help_of("archive", capsys)
    assert "version of the model, 1 to 255 printable characters without '/' (default: 1.0)" in said
    assert "keep: unchanged (default: keep; torchscript with --quantize)" in said
    assert "with the formats export and aoti int8-static" in said


def test_help_of_convert_tells_when_an_example_is_needed(capsys: Any) -> None:
    said = help_of("convert", capsys)
    assert "needed when the archive has no signature.json" in said
    assert "1:64 (default without --example: as in the archive's signature.json; for export and aoti" in said
    assert "--to export --example input.json --dynamic-batch 1:64 -o new.mar" in said
    assert "with the formats export and aoti int8-static" in said


@pytest.mark.parametrize("command", ["archive", "convert"])
def test_help_shows_an_example(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"torchere {command} " in capsys.readouterr().out.partition("example")[2]
