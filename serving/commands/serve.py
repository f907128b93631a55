"""`torchere serve`: its arguments, and the steps of a server start.

Modules are imported only when needed. The fork server starts first (`workers/spawn.py`).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchere.archiver.arguments import Parser, explained
from torchere.serving.commands.serve_options import (
    LOG_FORMAT_VARIABLE,
    OLD_DEFAULTS,
    LaunchRefused,
    Plan,
    add_serve_options,
    plan_from,
    refuse_packing_options,
    refuse_windows,
)
from torchere.serving.commands.tools import TORCHSERVE_VERSION
from torchere.serving.logs.access_lines import LineFormatter
from torchere.serving.logs.levels import set_at_start
from torchere.serving.logs.lines import AT_START, LEVELS
from torchere.serving.logs.lines import configure as configure_logging

logger = logging.getLogger(__name__)

_LOG_FORMATS = ("auto", "console", "json", "text", "torchserve")
_NOT_SET = "N/A"  # in the start block, as TorchServe writes it

_EXAMPLES = """\
examples:
  the models of a store:
    torchere serve --model-store store --models all --ts-config config.properties
  one model, packed on the way:
    torchere serve net.pt --example example.json
"""


_ADDRESSES = (
    "addresses are settings: write inference_address=http://127.0.0.1:9080 into a file, and name it by "
    "--ts-config (management_address and metrics_address likewise)"
)
_HINTS = {
    **dict.fromkeys(("--address", "--bind", "--host", "--inference-address", "--port", "-p"), _ADDRESSES),
    **dict.fromkeys(
        ("--num-workers", "--workers"),
        "workers are a setting: write default_workers_per_model=2 into a file, and name it by --ts-config",
    ),
}


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere serve` to `parser`."""
    from torchere.archiver.model_flags import add_packing_arguments  # noqa: PLC0415 - of this command only

    if isinstance(parser, Parser):
        parser.hints = _HINTS
    explained(parser, "Serve models in the foreground, until SIGTERM or Ctrl+C.", _EXAMPLES)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="file or folder of one model to serve: a .mar as it is; a .pt, .pt2, .onnx, .safetensors or "
        "Hugging Face folder is packed into a cache first",
    )
    add_serve_options(parser, "required here or in the configuration file, unless MODEL is given")
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=LEVELS,
        help="lowest level to log (default: that of root in log_levels, or INFO)",
    )
    parser.add_argument(
        "--log-format",
        choices=_LOG_FORMATS,
        help=f"default: the {LOG_FORMAT_VARIABLE} environment variable, or auto: console on a terminal, "
        "json otherwise; console: a summary and short lines; json: JSON lines; text: whole lines to read; "
        "torchserve: TorchServe's console format, with metrics if metrics_mode=log",
    )
    parser.add_argument("--process-name", help=argparse.SUPPRESS)  # only marks the command line
    parser.add_argument(OLD_DEFAULTS, action="store_true", help=argparse.SUPPRESS)
    add_packing_arguments(parser)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    refuse_windows()
    if options.model is None:
        refuse_packing_options(options, "no MODEL is given")
    else:
        from torchere.serving.commands import serve_model  # noqa: PLC0415 - most servers pack no model

        try:
            serve_model.serve_model(options, os.environ)
        except serve_model.NotPacked as error:
            return error.status
    # Imports create hundreds of thousands of permanent objects, and garbage collections of them take a tenth
    # of the start time. The server freezes the objects and enables the collector again once it has started.
    gc.disable()
    try:
        return _planned_and_served(options)
    finally:
        gc.enable()


def _planned_and_served(options: argparse.Namespace) -> int:
    plan = plan_from(options, os.environ)
    from torchere.handlers.cgroup import pin_to_limit  # noqa: PLC0415 - not needed for --help
    from torchere.serving.process.allocator import keep_freed_memory  # noqa: PLC0415 - likewise
    from torchere.serving.process.open_files import allow_many_files  # noqa: PLC0415 - likewise
    from torchere.serving.process.signals import SignalsKept  # noqa: PLC0415 - likewise
    from torchere.serving.workers.spawn import fork_server_ahead  # noqa: PLC0415 - likewise

    keep_freed_memory(os.environ)  # before logging starts the first thread: a thread keeps the heap it has
    allow_many_files()
    cores = pin_to_limit() if plan.settings.pin_cores else []
    with SignalsKept() as kept, fork_server_ahead(plan.settings) as fork_server:
        _log_as_asked(plan, options)
        if cores:
            logger.info("pin_cores=true: the server and its workers run on cores %s", cores)
        from torchere.serving.server import serve  # noqa: PLC0415 - takes most of a start

        if number := kept.let_go():
            logger.info("signal %d: stopped before the start was over", number)
            return 0
        return serve(plan.settings, fork_server)


def _log_as_asked(plan: Plan, options: argparse.Namespace) -> None:
    """Configure logging in the wanted format, and log the sources of the settings."""
    wanted = _log_format(options)
    lines: LineFormatter | None = None
    if wanted == "torchserve" or plan.settings.log_files:
        from torchere.serving.logs import files as log_files  # noqa: PLC0415 - rarely needed

        lines = log_files.Log4jFormatter() if wanted == "torchserve" else None
    if wanted == "console":
        from torchere.serving.logs.console import ConsoleFormatter, wants_color  # noqa: PLC0415 - for people

        lines = ConsoleFormatter(color=wants_color(os.environ, sys.stdout.isatty()))
    levels = dict(plan.settings.log_levels)
    root_level = levels.pop("root", "INFO")
    configure_logging(options.log_level or root_level, wanted == "json", sys.stdout, lines=lines)
    set_at_start(levels)
    if plan.settings.log_files:
        log_files.add_log_files(plan.log_directory)
    if wanted == "torchserve":
        for line in start_block(plan):
            logger.info("%s", line)
    _log_account(plan, options, names_file=wanted != "torchserve")


def _log_format(options: argparse.Namespace) -> str:
    """Return the format of the flag, or of the environment variable: `torchserve` has no such flag."""
    wanted: str = options.log_format or os.environ.get(LOG_FORMAT_VARIABLE) or "auto"
    if wanted not in _LOG_FORMATS:
        raise LaunchRefused(f"{LOG_FORMAT_VARIABLE} is {wanted!r}, expected one of {', '.join(_LOG_FORMATS)}")
    if wanted == "auto":
        return "console" if sys.stdout.isatty() else "json"
    return wanted


def start_block(plan: Plan) -> Iterator[str]:
    """Yield `Label: value` for each of TorchServe's labels that has a meaning here, in its order.

    TorchServe starts its log with these lines, and scripts look for them there. The labels of Java and Netty
    are left out, and so is the number of GPUs, which is not known yet.
    """
    from torchere.handlers.cgroup import available_cores  # noqa: PLC0415 - rarely needed
    from torchere.serving.config.kinds import shown_url  # noqa: PLC0415 - likewise

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
        "Initial Models": ",".join(map(shown_url, settings.load_models)) or None,
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
        yield f"{label}: {_NOT_SET if text is None else text}"


def _whole(path: Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _log_account(plan: Plan, options: argparse.Namespace, names_file: bool) -> None:
    origin = plan.config_file or "no configuration file"
    if names_file:  # the summary of the start repeats it
        logger.info("Config file: %s", origin, extra=AT_START)
    for finding in plan.configuration.of_level("warning"):
        logger.warning("%s, %s", origin, finding)
    if plan.settings.snapshot_models:
        count = len(plan.settings.snapshot_models)
        is_newest = plan.config_file and plan.config_file.parent == plan.log_directory / "config"
        # With --ncs no snapshot is looked up, but `model_snapshot` in a named file stays in effect.
        is_found = is_newest and not (options.no_config_snapshots or options.ts_config)
        remedy = "start without it by --ncs" if is_found else "to start without it, remove model_snapshot"
        logger.warning("%s: restoring its snapshot of %d models; %s", origin, count, remedy)
    if options.log_config:
        logger.warning(
            "--log-config has no effect: log4j2 files are not read; log_levels sets levels, PUT /log-level "
            "changes them, and %s=json|text|torchserve sets the format",
            LOG_FORMAT_VARIABLE,
        )
