"""The flags of `torch-model-archiver`, and of `torchere archive`, `convert` and `serve MODEL`.

Imports only a little of the standard library, because each start of a server imports this module.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchere.archiver.manifest import DEFAULT_VERSION, RUNTIMES, VERSION_RULE, is_version
from torchere.archiver.quantization import METHODS, limits_in_words
from torchere.archiver.request import (
    AOTI,
    BUILT_IN_HANDLERS,
    DEFAULT_HANDLER,
    EXPORT,
    FORMATS,
    ISAS,
    KEEP,
    MAX_SAMPLES,
    MODEL_FORMATS,
    TORCHSCRIPT,
    BuildOptions,
)
from torchere.archiver.split import Split

_ASK_FOR_TORCH = (
    "model_format",
    "factory",
    "parallel",
    "script",
    "trace",
    "example",
    "dynamic_batch",
    "dynamic_size",
    "isa",
    "quantize",
)
EXAMPLES = """\
examples:
  a state dict and its class, compiled ahead of time for batches of 1 to 64, served without any handler code:
    torchere archive --model-name net --model-file net.py --serialized-file net.pth \\
      --format aoti --example example.npy --dynamic-batch 1:64
  a class of an installed package and safetensors, as an exported program:
    torchere archive --model-name net --factory mypackage.nets:small --serialized-file net.safetensors \\
      --format export --example example.json --dynamic-batch 1:64
  TorchScript or ONNX unchanged, with a signature added:
    torchere archive --model-name net --serialized-file net.pt --example example.json
  with a handler, as with torch-model-archiver:
    torchere archive --model-name net -v 1.0 --serialized-file net.pt --handler image_classifier
"""


def add_archive_arguments(parser: argparse.ArgumentParser, *, models: bool = False) -> None:
    """Add every flag of `torch-model-archiver`; with `models`, also those about the model."""
    add = parser.add_argument
    add("--model-name", required=True, metavar="NAME", help="name of the model and of the archive's file")
    # torch-model-archiver accepts any version, as TorchServe's does, because it may pack for another server.
    default: dict[str, Any] = (
        {"default": DEFAULT_VERSION, "type": version_name} if models else {"required": True}
    )
    told = f" (default: {DEFAULT_VERSION})" if models else ""
    what = f"version of the model, {VERSION_RULE}{told}"
    add("-v", "--version", metavar="V", help=what, **default)
    _add_handler_argument(parser, models=models)
    add("--serialized-file", metavar="FILE", help="weights: .pt, .pth, .pt2, .onnx, .so, .safetensors ...")
    _add_file_arguments(parser)
    add(
        "--runtime",
        choices=RUNTIMES,
        default="python",
        help="runtime of the handler (default: python); LSP: a handler in C++",
    )
    add(
        "--export-path",
        metavar="DIR",
        default=".",
        help="where to put the archive (default: current directory)",
    )
    add(
        "--archive-format",
        choices=FORMATS,
        default="default",
        help="default: NAME.mar, weights uncompressed, other files compressed; zip-store: NAME.mar, nothing "
        "compressed; tgz: NAME.tar.gz; no-archive: a plain directory NAME",
    )
    add("-f", "--force", action="store_true", help="overwrite an existing archive")
    if models:
        _add_source_arguments(parser)
        add_build_arguments(parser, "--format")


def add_packing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `torchere archive` that say how `torchere serve` packs a model."""
    group = parser.add_argument_group("packing MODEL, as by torchere archive")
    add = group.add_argument
    add("--model-name", metavar="NAME", help="name of the model (default: that of its file)")
    add(
        "-v",
        "--version",
        metavar="V",
        type=version_name,
        default=DEFAULT_VERSION,
        help=f"version of the model (default: {DEFAULT_VERSION})",
    )
    _add_handler_argument(group, models=True)
    _add_file_arguments(group)
    _add_source_arguments(group)
    add_build_arguments(parser, "--format")


def packing_defaults() -> dict[str, Any]:
    """Return the defaults of the flags of `add_packing_arguments`, by their names in the namespace."""
    parser = argparse.ArgumentParser(add_help=False)
    add_packing_arguments(parser)
    return vars(parser.parse_args([]))


def _add_handler_argument(parser: argparse._ActionsContainer, *, models: bool) -> None:
    parser.add_argument(
        "--handler",
        required=not models,
        metavar="H",
        help=f"built-in handler ({', '.join(BUILT_IN_HANDLERS)}), or a Python file with optional :function"
        + (f" (default: {DEFAULT_HANDLER}, which needs no code)" if models else ""),
    )


def _add_file_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--model-file",
        metavar="FILE",
        help="Python file with the model's class, needed if the weights file does not contain the model",
    )
    parser.add_argument(
        "--extra-files",
        metavar="LIST",
        help="extra files to pack, comma-separated: files, directories (their contents are added) or globs",
    )
    parser.add_argument("-r", "--requirements-file", metavar="FILE", help="requirements.txt of the handler")
    parser.add_argument("-c", "--config-file", metavar="FILE", help="model-config.yaml")


def _add_source_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the flags about the model's class."""
    parser.add_argument(
        "--factory",
        metavar="MODULE:NAME",
        help="class or function of an importable package that creates the model; use instead of "
        "--model-file (its code is executed)",
    )
    parser.add_argument(
        "--parallel",
        type=_split,
        metavar="tensor=N[,pipeline=N]",
        help="spread the class, or the Hugging Face folder, over several ranks: each layer over N (tensor), "
        "the list of layers over N (pipeline), or both; layers may be named, as in "
        "tensor=2,layers.*.up=colwise,layers.*.down=rowwise. It is tried with the example, compared with one "
        "process, and written into model-config.yaml",
    )


def add_build_arguments(parser: argparse.ArgumentParser, format_flag: str) -> None:
    """Add the flags that convert the model; `format_flag` is the name of the flag for its format.

    `--format` is a name of this flag for all commands, because error texts about models use it.
    """
    group = parser.add_argument_group("model conversion (requires PyTorch)")
    add = group.add_argument
    is_convert = format_flag == "--to"
    formats = [name for name in MODEL_FORMATS if not (is_convert and name == KEEP)]
    add(
        *dict.fromkeys((format_flag, "--format")),
        dest="model_format",
        choices=formats,
        required=is_convert,
        help=f"{TORCHSCRIPT}: frozen TorchScript; {EXPORT}: torch.export; {AOTI}: machine code for a "
        "CPU, and the exported program as well"
        + ("" if is_convert else f"; {KEEP}: unchanged (default: {KEEP}; {TORCHSCRIPT} with --quantize)"),
    )
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--trace",
        action="store_true",
        help="TorchScript by tracing on the example only (default: trace, then --script if that fails)",
    )
    how.add_argument(
        "--script",
        action="store_true",
        help="TorchScript by compiling the source; keeps data-dependent control flow",
    )
    _add_example_arguments(group, is_convert)
    add("--isa", choices=ISAS, help="instruction set that aoti may use (default: this machine's)")
    add(
        "--allow-pickle",
        action="store_true",
        help="trust the input files: allow full unpickling, and running compiled code, to read the "
        "model (can execute arbitrary code)",
    )
    add(
        "--no-strict",
        action="store_true",
        help="take the weights that have the model's names; others are left out, and what the file lacks "
        "stays as the class makes it",
    )
    methods = "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())
    add("--quantize", metavar="METHOD", help=methods)
    add(
        "--samples",
        type=Path,
        metavar="PATH",
        help="file or folder to calibrate on and verify with; its first file is the default of --example",
    )
    add(
        "--max-samples",
        type=_positive,
        default=MAX_SAMPLES,
        metavar="N",
        help=f"files of the folder to use at most, evenly spaced (default: {MAX_SAMPLES}); more take longer "
        "and seldom change the result",
    )
    _add_verification_arguments(group)


def _add_example_arguments(group: argparse._ArgumentGroup, is_convert: bool) -> None:
    add = group.add_argument
    add(
        "--example",
        type=Path,
        metavar="FILE",
        help="inputs to run the model on: .json (a request, an object of lists, or a list), .pt, .npy, .npz, "
        "or an image, which the handler decodes, crops and normalises as in a request (for a handler that "
        "does not take images: an FP32 tensor of shape [1, 3, height, width] with values from 0 to 1)"
        + (
            "; needed when the archive has no signature.json; TorchServe's archives have none"
            if is_convert
            else ""
        ),
    )
    add(
        "--dynamic-batch",
        metavar="MIN:MAX",
        help="let the first dimension of every input vary, for example 1:64"
        + (
            " (default without --example: as in the archive's signature.json; for export and aoti 1:64 if "
            "there it has no largest size)"
            if is_convert
            else ""
        ),
    )
    add(
        "--dynamic",
        "--dynamic-size",
        dest="dynamic_size",
        action="append",
        default=[],
        metavar="INPUT,...DIM=RANGE",
        help="let another dimension vary; it has the same size in all named inputs: ids,mask.1=2:512; "
        "x.1=64: (at least 64), x.2=32*k (multiples of 32), x.2=64:1024:32"
        + (" (default without --example: as in the archive's signature.json)" if is_convert else ""),
    )


def _add_verification_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-drift",
        type=allowed_drift,
        metavar="X",
        help="largest allowed drift: the RMS difference between the outputs of the packed and the original "
        "model, relative to the original's; a single channel may drift further (default: "
        f"{limits_in_words()})",
    )
    add(
        "--accept-drift",
        action="store_true",
        help="pack the model even if it differs too much from the original",
    )
    add(
        "--accept-slower",
        action="store_true",
        help="pack a quantised model even if it takes as much processor time as in fp32, or more",
    )
    add("--no-verify", action="store_true", help="do not compare the packed model with the original")


def _split(text: str) -> Split:
    try:
        return Split.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:9]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number, 1 or more")
    return int(text[:9])


def version_name(text: str) -> str:
    """Return the version if a server accepts it, for argparse."""
    if not is_version(text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; expected {VERSION_RULE}")
    return text


def allowed_drift(text: str) -> float:
    """Return the value of `--max-drift`, for argparse: a finite number, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number, 0 or more")
    return found


def wants_model(namespace: argparse.Namespace) -> bool:
    """Return whether torch is needed: a flag requires it, or no handler is named, or the model is a folder.

    Without a handler, the signature has to be derived from the model, and no server loads a folder unchanged.
    """
    if namespace.handler is None or any(getattr(namespace, name, None) for name in _ASK_FOR_TORCH):
        return True
    return bool(namespace.serialized_file) and Path(namespace.serialized_file).is_dir()


def build_options(namespace: argparse.Namespace) -> BuildOptions:
    """Return the options given by the flags of `torchere archive`."""
    return replace(
        conversion_options(namespace),
        serialized_file=_path(namespace.serialized_file),
        model_file=_path(namespace.model_file),
        factory=namespace.factory,
        config_file=_path(namespace.config_file),
        parallel=namespace.parallel,
    )


def conversion_options(namespace: argparse.Namespace) -> BuildOptions:
    """Return the options given by the flags of `add_build_arguments`, without the files of the model."""
    return BuildOptions(
        model_format=namespace.model_format,
        script=namespace.script,
        trace=namespace.trace,
        example=namespace.example,
        dynamic_batch=namespace.dynamic_batch,
        dynamic_sizes=tuple(namespace.dynamic_size),
        isa=namespace.isa,
        allow_pickle=namespace.allow_pickle,
        strict=not namespace.no_strict,
        quantize=namespace.quantize,
        samples=namespace.samples,
        max_samples=namespace.max_samples,
        verify=not namespace.no_verify,
        max_drift=namespace.max_drift,
        accept_drift=namespace.accept_drift,
        accept_slower=namespace.accept_slower,
    )


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
