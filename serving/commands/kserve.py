"""`torchere kserve`: serves the models that KServe's storage initializer put into a folder.

The folder holds `config/` and `model-store/` as for TorchServe's runtime, archives, or one bare model.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from torchere.archiver.arguments import described
from torchere.serving.commands.serve_options import (
    OLD_DEFAULTS,
    LaunchRefused,
    add_serve_options,
    become_server,
    serve_arguments,
    written,
)

# In the order of preference: a folder may hold a model in several formats.
_MODELS = (".pt2", ".onnx", ".pt", ".pth", ".safetensors")
_BESIDE = {  # packing options, and files beside a bare model that set them; the first one found counts
    "--handler": ("handler.py",),
    "--model-file": ("model.py",),
    "--requirements-file": ("requirements.txt",),
    "--example": tuple(f"example.{suffix}" for suffix in ("json", "pt", "npy", "png", "jpg", "jpeg")),
}
_READ = {name for names in _BESIDE.values() for name in names}
_ENVELOPE, _PROTOCOL = "TS_SERVICE_ENVELOPE", "PROTOCOL_VERSION"
_UNSET = ("", "<no value>")  # KServe fills in the latter for a label that an InferenceService lacks
# Addresses where KServe expects the server; for gRPC inference, the port of KServe's wrapper for TorchServe.
# Environment variables override them.
_PROPERTIES = """
enable_envvars_config=true
inference_address=http://0.0.0.0:8080
metrics_address=http://0.0.0.0:8082
management_address=http://127.0.0.1:8091
grpc_inference_address=0.0.0.0
grpc_inference_port=8081
grpc_management_address=127.0.0.1
grpc_management_port=8092
ts_open_inference_protocol=oip
"""


def add_kserve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere kserve` to `parser`."""
    described(
        parser,
        "Serve the folder that KServe's storage initializer filled: config/ and model-store/ of TorchServe,\n"
        "archives, or one bare model, which is packed first. See docs/kserve.md.",
        "torchere kserve --model-name=net --model-dir=/mnt/models",
    )
    parser.add_argument("--model-name", "--model_name", required=True, metavar="NAME", help="of a bare model")
    parser.add_argument(
        "--model-dir", "--model_dir", default="/mnt/models", metavar="DIR", help="default: /mnt/models"
    )
    add_serve_options(parser, "default: that of the archives in --model-dir")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Replace this process by a server of the folder's models."""
    choose_envelope(os.environ)
    served = arguments_of(Path(options.model_dir), options.model_name)
    if not any(argument.startswith("--ts-config") for argument in served):
        served.append(f"--ts-config={written(_PROPERTIES)}")
    become_server([*served, *serve_arguments(options)])


def choose_envelope(environ: MutableMapping[str, str]) -> None:
    """Set the service envelope that KServe's TorchServe runtime has for a protocol, unless one is set."""
    if environ.get(_ENVELOPE, "") in _UNSET:
        is_v2 = environ.get(_PROTOCOL, "v1") in ("v2", "grpc-v2")
        environ[_ENVELOPE] = "kservev2" if is_v2 else "kserve"


def arguments_of(folder: Path, name: str) -> list[str]:
    """Return the arguments of `torchere serve` for the models in a folder.

    Raises:
        LaunchRefused: there is no model, or there are several.
    """
    store, config = folder / "model-store", folder / "config" / "config.properties"
    if config.is_file():
        return [OLD_DEFAULTS, f"--model-store={store}", f"--ts-config={config}"]
    for archives in (store, folder):
        if list(archives.glob("*.mar")):
            return [f"--model-store={archives}", "--models=all"]
    model = _model_in(folder)
    return [str(model), f"--model-name={name}", *_packing_arguments(model)]


def _model_in(folder: Path) -> Path:
    """Return the file or folder of the one model; descend where `_inner` names a folder."""
    if not folder.is_dir():
        raise LaunchRefused(f"{folder} not found: expected the folder in which KServe puts models")
    # A claim that is a disk of its own has lost+found.
    entries = [each for each in sorted(folder.iterdir()) if not each.name.startswith((".", "lost+found"))]
    if (inner := _inner(entries)) is not None:
        return _model_in(inner)
    if (folder / "config.json").is_file():
        return folder  # a Hugging Face folder: weights beside their configuration
    for suffix in _MODELS:
        models = [entry for entry in entries if entry.suffix == suffix and entry.stem != "example"]
        if len(models) > 1:
            names = ", ".join(model.name for model in models)
            raise LaunchRefused(
                f"{folder} holds several models ({names}): pack them into archives, or leave one"
            )
        if models:
            return models[0]
    raise LaunchRefused(
        f"{folder} holds no model: expected config/config.properties with model-store/, *.mar, one of "
        f"{', '.join(_MODELS)}, or a Hugging Face folder"
    )


def _inner(entries: list[Path]) -> Path | None:
    """Return the folder to look into: the only one, or the highest of numbered ones, as Triton does."""
    folders = [
        each
        for each in entries
        # In Triton's layout a configuration and a file of class names lie beside the folder `1/`.
        if each.name != "config.pbtxt" and (each.suffix != ".txt" or each.name in _READ)
    ]
    if not folders or not all(each.is_dir() for each in folders):
        return None
    if len(folders) == 1:
        return folders[0]
    numbered = all(re.fullmatch("[0-9]+", each.name) for each in folders)
    return max(folders, key=lambda each: int(each.name)) if numbered else None


def _packing_arguments(model: Path) -> list[str]:
    """Return the packing options that follow from the files beside a model."""
    if model.is_dir():
        return []
    given = {
        option: next((file for name in names if (file := model.parent / name).is_file()), None)
        for option, names in _BESIDE.items()
    }
    arguments = [f"{option}={file}" for option, file in given.items() if file is not None]
    if model.suffix in (".pt", ".pth") and not (given["--handler"] or given["--example"]):
        # Without an example the inputs of TorchScript are unknown: they go to it as JSON has them.
        arguments.append("--handler=base_handler")
    return arguments
