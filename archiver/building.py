"""What to make of a model before it is packed, said once; the part that needs torch is in `models`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KEEP, TORCHSCRIPT, EXPORT, AOTI = "keep", "torchscript", "export", "aoti"
MODEL_FORMATS = (KEEP, TORCHSCRIPT, EXPORT, AOTI)
ISAS = ("avx2", "avx512")
BUILD_NAME = "MAR-INF/build.json"
FALLBACK_NAME = "model.exported.pt2"  # beside a model compiled for one instruction set
DEFAULT_HANDLER = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """A model and what it should become; see `torchere archive --help` for each.

    `model_format` None means: as it is, or TorchScript when it is quantised.
    """

    serialized_file: Path | None = None
    model_file: Path | None = None
    factory: str | None = None
    model_format: str | None = None
    script: bool = False  # compile the source for TorchScript instead of tracing a run
    example: Path | None = None
    example_signature: Path | None = None  # a signature.json to make an example from, when there is none
    dynamic_batch: str | None = None  # "1:64"
    dynamic_sizes: tuple[str, ...] = ()  # "ids,mask:1=2:512"
    isa: str | None = None  # None: that of this machine
    allow_pickle: bool = False
    needs_signature: bool = True  # False: the handler does without
    quantize: str | None = None
    samples: Path | None = None
    verify: bool = True
    max_drift: float | None = None  # None: what the kind of change allows
    accept_drift: bool = False  # pack what the verification refuses, too
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """What to pack. All paths exist; those made here lie in the work folder of the call."""

    serialized_file: Path | None
    model_file: Path | None
    config_file: Path | None
    beside: Path  # a folder whose contents go into the archive under their relative names
    extra_files: tuple[Path, ...] = ()
