"""TorchScript that would read or write files is known by its source; none of it is loaded."""

from __future__ import annotations

import io
import zipfile

import pytest

from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.torchscript import check_script
from torchere.archiver.scan.weights import classify

MODULE = """\
class Net(Module):
  __parameters__ = ["save", ]
  __buffers__ = []
  save : Tensor
  ops : __torch__.torch.nn.modules.container.ModuleList
  def forward(self: __torch__.Net,
    x: Tensor) -> Tensor:
    _0 = getattr(self.ops, "0")
    save = self.save
    y = torch.add((_0).forward(x, ), save)
{line}
    return ops.prim.NumToTensor(torch.dim(y))
"""


def packed(line: str, name: str = "code/__torch__.py") -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data.pkl", b"")
        archive.writestr(f"net/{name}", MODULE.format(line=line))
        archive.writestr("net/constants.pkl", b"")
    return buffer


def check(file: io.BytesIO) -> None:
    check_script(file, file.seek(0, io.SEEK_END))


@pytest.mark.parametrize(
    "line",
    [
        "",
        '    ops.prim.RaiseException("torch can not save it: use ops", "builtins.RuntimeError")',
        '    z = (self.save).forward("a \\" torch.save")',
        "    z = torch.__isnot__(self.save, None)  # torch.save(x)",
        "    z = self.load(x, from_file=1)",
    ],
)
def test_other_models_are_let_be(line: str) -> None:
    check(packed(line))


# Each of these was seen to write a file, or would map one.
@pytest.mark.parametrize(
    "line",
    [
        '    torch.save(x, "p")',
        '    z = torch.from_file("p", False, 3)',
        '    ops.aten.save(x, "p")',
        '    ops.image.write_file("p", x)',
        '    t = torch\n    t.save(x, "p")',
        '    t = torch.save\n    t(x, "p")',
        '    t = ops.aten\n    t.save(x, "p")',
        '    t = ops\n    t.aten.save(x, "p")',
        '    getattr(torch, "save")(x, "p")',
        '    getattr(torch, "\\163ave")(x, "p")',
        '    getattr(torch, "sa" "ve")(x, "p")',
        '    getattr(ops.aten, "sa" "ve")(x, "p")',
        '    f = torch\n    getattr(f, "sa" "ve")(x, "p")',
        '    (torch).save(x, "p")',
        '    torch . save (x, "p")',
        '    (torch. # a comment\n   save)(x, "p")',
        '    (torch.\n   save)(x, "p")',
        '    torch.\\\n   save(x, "p")',
        '    z = """ " """ ; torch.save(x, "p")',
        '    z = \' " \' ; torch.save(x, "p")',
    ],
)
def test_whatever_touches_files_is_refused(line: str) -> None:
    with pytest.raises(UnsafeModel, match=r"in code/__torch__\.py"):
        check(packed(line))


def test_sources_are_found_whatever_the_case_of_their_names() -> None:
    with pytest.raises(UnsafeModel):
        check(packed('    torch.save(x, "p")', "CODE/__torch__/net.PY"))


def test_a_zip_that_two_readers_would_read_differently_is_refused() -> None:
    file = packed("")
    with pytest.raises(UnsafeModel, match="damaged"):
        check(io.BytesIO(file.getvalue() + b"more"))


def test_forms_that_torch_loads_and_never_saves_so_are_refused() -> None:
    plain = packed("").getvalue()
    for other in (b"X" * 64 + plain, b"PK\5\6" + plain, b"(\0\0\0PTMF" + bytes(64), b""):
        with pytest.raises(UnsafeModel, match=r"no zip as torch\.jit\.save writes it"):
            check(io.BytesIO(other))


def test_inspection_says_so() -> None:
    safe, unsafe = (classify("m.pt", packed(line)) for line in ("", '    torch.save(x, "p")'))
    assert (safe.kind, safe.foreign) == ("TorchScript", ())
    assert "touches no files" in safe.risk
    assert unsafe.foreign == ("torch.save in code/__torch__.py",)
    assert "READS OR WRITES FILES: torch.save" in unsafe.risk
