"""Regenerate the Python modules beside the .proto files; needs the `dev` extra.

    python serving/frontend/grpc/protos/generate.py

The files are registered under `torchere/serving/...`, so that they do not collide with another
`inference.proto` in the process, and the generated imports are absolute. Many libraries, among them Triton's
and KServe's clients, register the package of `open_inference`, so its messages use a separate descriptor
pool: two files that define the same message in one pool are an error. The script removes the generated check
of the protobuf version: it ties the modules to the newest runtime, but the API they use has not changed since
protobuf 4.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
PACKAGE = "torchere/serving/frontend/grpc/protos"
NAMES = ("inference", "management", "open_inference")
PRIVATE = frozenset({"open_inference"})  # not in the process-wide descriptor pool
_VERSION_CHECKS = (
    re.compile(r"from google\.protobuf import runtime_version as _runtime_version\n"),
    re.compile(r"_runtime_version\.ValidateProtobufRuntimeVersion\(.*?\n\)\n", re.DOTALL),
)


def main() -> int:
    """Run protoc, then remove the version check and set the descriptor pools; return protoc's exit status."""
    from google import rpc
    from grpc_tools import protoc

    well_known = str(files("grpc_tools") / "_proto")
    googleapis = str(Path(next(iter(rpc.__path__))).parents[1])
    arguments = [
        "protoc",
        f"-I{ROOT / '.typing'}",
        f"-I{well_known}",
        f"-I{googleapis}",
        f"--python_out={ROOT / '.typing'}",
        f"--pyi_out={ROOT / '.typing'}",
        *(f"{PACKAGE}/{name}.proto" for name in NAMES),
    ]
    status = int(protoc.main(arguments))
    if status == 0:
        for name in NAMES:
            _free_of_version(HERE / f"{name}_pb2.py")
        for name in PRIVATE:
            _in_a_pool_of_its_own(HERE / f"{name}_pb2.py")
    return status


def _free_of_version(module: Path) -> None:
    text = module.read_text()
    for pattern in _VERSION_CHECKS:
        text = pattern.sub("", text)
    module.write_text(text)


def _in_a_pool_of_its_own(module: Path) -> None:
    text = module.read_text()
    shared, own = "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"
    if text.count(shared) != 1:
        raise RuntimeError(f"{module}: expected {shared} once, found it {text.count(shared)} times")
    module.write_text(text.replace(shared, own))


if __name__ == "__main__":
    sys.exit(main())
