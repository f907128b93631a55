"""The lines about its settings with which TorchServe starts its log, for scripts that look for them there."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchere.handlers.cgroup import available_cores
from torchere.serving.commands.serve_options import Plan
from torchere.serving.commands.tools import TORCHSERVE_VERSION

_NONE = "N/A"


def start_block(plan: Plan) -> Iterator[str]:
    """Yield `Label: value` for each of TorchServe's labels that has a meaning here, in its order.

    Those of Java and Netty are left out, and the number of GPUs, which is not known yet.
    """
    settings = plan.settings
    values: dict[str, object] = {
        "Torchserve version": TORCHSERVE_VERSION,
        "TS Home": Path(sys.prefix),
        "Current directory": Path.cwd(),
        "Temp directory": settings.temp_dir or tempfile.gettempdir(),
        "Metrics config path": settings.metrics_config,
        "Number of CPUs": available_cores(),
        "Python executable": sys.executable,
        "Config file": plan.config_file,
        "Inference address": settings.inference_address,
        "Management address": settings.management_address,
        "Metrics address": settings.metrics_address,
        "Model Store": _whole(settings.model_store),
        "Initial Models": ",".join(settings.load_models) or None,
        "Log dir": _whole(plan.log_directory),
        "Metrics dir": _whole(settings.metrics_directory),
        "Default workers per model": settings.default_executors or None,
        "Blacklist Regex": settings.hidden_env_vars,
        "Maximum Response Size": settings.limits.max_response_bytes,
        "Maximum Request Size": settings.limits.max_request_bytes,
        "Limit Maximum Image Pixels": settings.limit_max_image_pixels,
        "Allowed Urls": f"[{','.join(settings.allowed_urls)}]",
        "Custom python dependency for model allowed": settings.install_dependencies,
        "Enable metrics API": settings.metrics_address is not None,
        "Metrics mode": settings.metrics_mode.upper(),
        "Disable system metrics": not settings.system_metrics_enabled,
        "Workflow Store": _whole(settings.workflow_store or settings.model_store),
        "System metrics command": settings.system_metrics_command or None,
        "Model API enabled": settings.model_api_enabled,
    }
    for label, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else value  # as Java writes it
        yield f"{label}: {_NONE if text is None else text}"


def _whole(path: Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)
