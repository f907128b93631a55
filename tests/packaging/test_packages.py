"""The packaging rewrites folder names, so three things could go wrong unseen: each has its guard."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from setuptools import find_packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("archiver", "client", "handlers", "serving")


def packages() -> list[str]:
    found = []
    for room in ROOMS:
        below = find_packages(str(ROOT / room))
        found += [f"torchere.{room}", *(f"torchere.{room}.{name}" for name in below)]
    return sorted(found)


def test_every_subpackage_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == packages()


def test_every_extra_is_listed_in_the_documentation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    _, _, section = (ROOT / "docs/operations.md").read_text().partition("\n## Extras\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(extras)


def test_the_oldest_python_can_install_what_is_pinned_for_it() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    refused = []
    for pin in pins:
        try:
            found = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for_oldest = pin.marker is None or pin.marker.evaluate({"python_version": "3.10"})
        needs = SpecifierSet(*found.metadata.get_all("Requires-Python", []))
        if for_oldest and pin.specifier.contains(found.version) and "3.10.13" not in needs:
            refused.append(f"{pin} needs Python {needs}")
    assert refused == []  # of each, a second line with `python_version < '3.11'` names the last that has it


def test_no_source_file_is_loaded_under_two_names() -> None:
    code = (
        "import sys, pathlib, torchere.serving.server\n"
        f"root = pathlib.Path({str(ROOT)!r})\n"
        "files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)]\n"
        "ours = [f for f in files if pathlib.Path(f).is_relative_to(root) and '.venv' not in f]\n"
        "assert len(ours) > 30, ours\n"
        "assert len(ours) == len(set(ours)), sorted(f for f in ours if ours.count(f) > 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_every_module_and_imports(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is absent from the `packages` configuration" not in done.stdout + done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if name.startswith("torchere/")}
        opened.extractall(tmp_path / "site")
    source = {"torchere/__init__.py"} | {
        f"torchere/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")
    }
    headers = {f"torchere/{path.relative_to(ROOT)}" for path in (ROOT / "handlers/cpp").rglob("*.hh")}
    assert "torchere/handlers/cpp/include/src/backends/handler/base_handler.hh" in headers
    assert source | headers | {"torchere/py.typed"} <= held
    modules = sorted(name[:-3].replace("/", ".").removesuffix(".__init__") for name in source)
    runnable = [name for name in modules if not name.endswith("__main__")]
    clone = tmp_path / "torchere" / "serving"  # a checkout in the current folder must not be imported
    clone.mkdir(parents=True)
    (clone / "__init__.py").write_text("raise ImportError('the checkout')")
    code = (
        "import sys, importlib\n"
        "assert '' in sys.path\n"
        f"sys.path.insert(1, {str(tmp_path / 'site')!r})\n"  # before an editable installation
        "sys.meta_path = [f for f in sys.meta_path if '__editable__' not in type(f).__module__ + repr(f)]\n"
        f"for name in {runnable!r}: importlib.import_module(name)\n"
        f"assert sys.modules['torchere.serving'].__file__.startswith({str(tmp_path / 'site')!r})\n"
        "import torchere; assert torchere.__version__ == importlib.metadata.version('torchere')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wheel_of_the_module_names_of_torchserve_can_be_built_from_their_source_archive(
    tmp_path: Path,
) -> None:
    copy = shutil.copytree(ROOT / "compat", tmp_path / "compat")  # building writes beside the files
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(copy)]

    done = subprocess.run(build, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as opened:
        assert {"torchere_ts.pth", "torchere_ts/__init__.py"} <= set(opened.namelist())


def test_an_editable_installation_has_a_version_and_no_folder_above_a_clone_hides_it(tmp_path: Path) -> None:
    code = f"import build; print(build.ProjectBuilder({str(ROOT)!r}).build('editable', {str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as opened:
        opened.extractall(site)
    other = tmp_path / "torchere" / "serving"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another clone')")
    code = (
        "import sys, site, importlib.metadata, importlib.util\n"
        "sys.meta_path = [f for f in sys.meta_path if '__editable__' not in type(f).__module__ + repr(f)]\n"
        "assert '' in sys.path\n"
        f"site.addsitedir({str(site)!r})\n"
        "import torchere, torchere.serving, torchere.archiver\n"
        "assert torchere.__version__ == importlib.metadata.version('torchere')\n"
        f"assert torchere.serving.__file__ == {str(ROOT / 'serving/__init__.py')!r}\n"
        "assert not importlib.util.find_spec('torchere').has_location\n"  # what import-linter asks
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
