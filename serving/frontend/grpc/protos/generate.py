"""Regenerates the Python modules beside the .proto files; needs the `dev` extra.

    python serving/frontend/grpc/protos/generate.py

The files are registered under `torchere/serving/...`, so that they meet no other `inference.proto` in a
process, and the generated imports are absolute. The generated check of the protobuf version is taken out:
it ties the modules to the newest runtime, and what they use is the same since protobuf 4.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
PACKAGE = "torchere/serving/frontend/grpc/protos"
NAMES = ("inference", "management")
_VERSION_CHECKS = (
    re.compile(r"from google\.protobuf import runtime_version as _runtime_version\n"),
    re.compile(r"_runtime_version\.ValidateProtobufRuntimeVersion\(.*?\n\)\n", re.DOTALL),
)


def main() -> int:
    """Run protoc, then take the version check out."""
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
    return status


def _free_of_version(module: Path) -> None:
    text = module.read_text()
    for pattern in _VERSION_CHECKS:
        text = pattern.sub("", text)
    module.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
