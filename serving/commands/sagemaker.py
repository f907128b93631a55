"""`torchere sagemaker`: serves the model folders of a SageMaker container.

The variables are those of SageMaker's inference toolkit. Everything is on one port, as SageMaker expects.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchere.archiver.arguments import described
from torchere.serving.commands.serve_options import LaunchRefused, become_server, written
from torchere.serving.store.environment import show_server_packages, venv_command

logger = logging.getLogger(__name__)

HANDLER = "torchere.handlers.sagemaker"
MODEL = "model"
_PER_MODEL = {  # of a single model; if one is set, the others have the toolkit's defaults
    "minWorkers": ("SAGEMAKER_TS_MIN_WORKERS", 1),
    "maxWorkers": ("SAGEMAKER_TS_MAX_WORKERS", 1),
    "batchSize": ("SAGEMAKER_TS_BATCH_SIZE", 1),
    "maxBatchDelay": ("SAGEMAKER_TS_MAX_BATCH_DELAY", 100),
    "responseTimeout": ("SAGEMAKER_TS_RESPONSE_TIMEOUT", 60),
}


def add_sagemaker(parser: argparse.ArgumentParser) -> None:
    """Describe `torchere sagemaker`, which takes no arguments."""
    text = (
        "Serve the model folders of a SageMaker container, as its variables ask for. See docs/sagemaker.md."
    )
    described(parser, text, "torchere sagemaker")
    parser.set_defaults(run=run_sagemaker)


def run_sagemaker(_options: argparse.Namespace) -> int:
    """Install the requirements of the model folder, and replace this process by a server of it.

    Raises:
        LaunchRefused: a variable is invalid, the folder does not exist, or a requirement can't be installed.
    """
    environ = os.environ
    base = Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    several = environ.get("SAGEMAKER_MULTI_MODEL") == "true"
    folder = base / ("models" if several else "model")
    if not folder.is_dir():
        raise LaunchRefused(f"{folder} not found: expected the folder in which SageMaker puts models")
    requirements, python = folder / "code" / "requirements.txt", sys.executable
    if not several and requirements.is_file():
        python = _install_requirements(requirements)
    properties = properties_of(environ, folder, several)
    arguments = ["--ts-config", written(properties), "--model-store", str(folder)]
    become_server(arguments if several else [*arguments, "--models", f"{MODEL}={folder}"], python)


def properties_of(environ: Mapping[str, str], folder: Path, several: bool) -> str:
    """Return the configuration that the variables ask for.

    Raises:
        LaunchRefused: a number is invalid.
    """
    port = _number(environ, "SAGEMAKER_BIND_TO_PORT", 8080)
    timeout_s = _number(environ, "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", 0)
    timeout_s = timeout_s or _number(environ, "SAGEMAKER_MODEL_SERVER_TIMEOUT", 60)
    address = f"http://0.0.0.0:{port}"
    values = {
        "inference_address": address,
        # For an endpoint of several models, SageMaker loads and unloads models on the same port.
        "management_address": address if several else "http://127.0.0.1:0",
        "insecure_management": str(several).lower(),
        "metrics_address": "http://127.0.0.1:0",
        "grpc_inference_address": "127.0.0.1",
        "grpc_inference_port": "0",
        "grpc_management_address": "127.0.0.1",
        "grpc_management_port": "0",
        "default_service_handler": HANDLER,
        "decode_input_request": "false",
        "disable_token_authorization": "true",
        "enable_model_api": str(several).lower(),
        "enable_envvars_config": "true",
        "default_response_timeout": str(timeout_s),
    }
    # SageMaker asks for no workers when it loads a model, so without a default such a model would have none.
    workers = _number(environ, "SAGEMAKER_MODEL_SERVER_WORKERS", 1 if several else 0)
    if workers:
        values["default_workers_per_model"] = str(workers)
    megabytes = _number(environ, "SAGEMAKER_MAX_PAYLOAD_IN_MB", 0)
    if megabytes:
        values["max_request_size"] = str(megabytes * 1024 * 1024)
    if not several and any(variable in environ for variable, _ in _PER_MODEL.values()):
        settings = {key: _number(environ, name, default) for key, (name, default) in _PER_MODEL.items()}
        # The toolkit's default may be less than minWorkers, and TorchServe starts minWorkers all the same.
        variable, default = _PER_MODEL["maxWorkers"]
        settings["maxWorkers"] = _number(environ, variable, max(default, settings["minWorkers"]))
        entry = {"defaultVersion": True, "marName": MODEL, **settings}
        values["models"] = json.dumps({MODEL: {"1.0": entry}})
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise LaunchRefused(f"{name} is {text!r}, expected a whole number")
    return int(text)


def _install_requirements(requirements: Path) -> str:
    """Install the packages of a model folder, as SageMaker's containers do; return the Python that has them.

    It is this Python, unless this user may not write to its environment, as in the image. Then it is that of
    a new environment, which searches its own packages before this one's.
    """
    # The toolkit takes CodeArtifact's index instead of pip's; from pip's might come a stranger's package.
    if os.environ.get("CA_REPOSITORY_ARN") and not os.environ.get("PIP_INDEX_URL"):
        raise LaunchRefused(
            f"CA_REPOSITORY_ARN is set, and {requirements} has packages to install, but this server does not "
            "log in to CodeArtifact; set PIP_INDEX_URL to the address of the repository, with a token in it"
        )
    logger.info("installing the packages of %s", requirements)
    may_write = os.access(sysconfig.get_path("purelib"), os.W_OK)
    python = sys.executable if may_write else _new_environment()
    if subprocess.run([python, "-m", "pip", "install", "-r", str(requirements)], check=False).returncode:
        raise LaunchRefused(f"{requirements}: pip could not install the packages; its messages are above")
    return python


def _new_environment() -> str:
    place = Path(tempfile.mkdtemp(prefix="torchere-sagemaker-"))
    if subprocess.run(venv_command(place), check=False).returncode:
        raise LaunchRefused(f"{place}: no virtual environment could be made there; the messages are above")
    show_server_packages(place)
    return str(place / "bin" / "python")
