"""The options of `torchere serve` and `torchserve`, and their conversion to server settings.

The flags, the order of the configuration files and the messages of `LaunchRefused` are those of TorchServe
0.12. For `--help`, the modules that build the settings are not imported. Files are looked up by `os.path`:
`Path.is_file` raises an error before Python 3.14 if this user may not search the folder.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torchere.serving.config.properties import Entry
    from torchere.serving.config.resolve import Configuration
    from torchere.serving.config.server_settings import ServerSettings

DEFAULT_FILE = Path("config.properties")
LOG_FORMAT_VARIABLE = "TORCHERE_LOG_FORMAT"
# Given by `torchserve`, the old name: scrapers of its log files and dashboards rely on TorchServe's defaults.
OLD_DEFAULTS = "--old-defaults"
_LOCAL_CLIENTS_URLS = (
    "file://.*",
    "https?://.*",
    r"https?://(127\.0\.0\.1|\[::1\]|localhost)(:[0-9]+)?/.*",  # a broader pattern leaves this machine out
)
_VALUED = ("ts_config", "model_store", "workflow_store", "log_config", "cpp_log_config", "plugins_path")
_SWITCHES = ("no_config_snapshots", "disable_token_auth", "enable_model_api", "log_files", "supervise")
_IGNORED = "ignored (for TorchServe compatibility)"
_SNAPSHOT_NAME = re.compile(r"[0-9]{17}-(startup|snapshot|shutdown)\.cfg")


class LaunchRefused(Exception):
    """The server can't start with these options; the message is that of TorchServe's launcher."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings for a server start, and the findings on their sources."""

    settings: ServerSettings
    configuration: Configuration
    config_file: Path | None
    log_directory: Path  # of log files and snapshots; may not exist yet


def refuse_windows() -> None:
    """Raise LaunchRefused on Windows, before the imports of modules that it does not have."""
    if sys.platform == "win32":
        raise LaunchRefused("The server runs on Linux and macOS; on Windows use WSL or the image.")


def add_serve_options(
    parser: argparse.ArgumentParser, store: str = "required here or in the configuration file"
) -> None:
    """Add the options of a server start to `parser`; `serve_arguments` converts them back to flags.

    `store`: ends the help of `--model-store`; it says where the folder comes from without this option.
    """
    add = parser.add_argument
    add(
        "--ts-config",
        metavar="FILE",
        help="properties file (the TS_CONFIG_FILE environment variable takes precedence)",
    )
    add(
        "--model-store",
        metavar="DIR",
        help=f"directory of the archives; {store}",
    )
    add(
        "--workflow-store",
        metavar="DIR",
        help="directory of the workflow archives (default: the model store)",
    )
    add("--models", metavar="MODEL", nargs="+", help="models to load: [NAME=]ARCHIVE ..., or 'all'")
    # --log: a valid abbreviation in TorchServe, which has no other option with this prefix
    not_read = f"{_IGNORED}, but has to exist"
    add("--log-config", "--log", metavar="FILE", help=f"{not_read}: log4j2 files have no effect")
    add("--cpp-log-config", metavar="FILE", help=f"{not_read}: handlers in C++ log as others do")
    add(
        "--no-config-snapshots",
        "--ncs",
        action="store_true",
        help="neither restore the newest snapshot of the log directory nor write any",
    )
    add("--plugins-path", "--ppath", metavar="PATH", help=f"{_IGNORED}: Java plug-ins can't be loaded")
    add(
        "--disable-token-auth",
        "--dt",
        action="store_true",
        help="accept requests without a token (disables authentication)",
    )
    add(
        "--enable-model-api",
        action="store_true",
        help="allow registering and unregistering models over the network",
    )
    add("--supervise", action="store_true", help="ignored: torchere does not restart a server that has ended")
    add(
        "--log-files",
        action="store_true",
        help="also write access_log.log, model_log.log and ts_log.log to LOG_LOCATION (default: logs)",
    )


def old_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults of `torchserve`, the old name, by key of the configuration file.

    Tools and start scripts for TorchServe set none of these. A client that may register an archive may run
    code, so allowing any URL adds no risk while only clients on this machine, or with a token, may register.
    """
    is_sagemaker = environ.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true"  # managed from outside
    return {
        "metrics_mode": "log",
        "insecure_management": "true" if is_sagemaker else "local",
        "allowed_urls": ",".join(_LOCAL_CLIENTS_URLS),
    }


def serve_arguments(options: argparse.Namespace) -> list[str]:
    """Return the flags that give `torchere serve` these options."""
    # A flag and its value are one word: the value may begin with "-".
    valued = [f"{_flag(name)}={value}" for name in _VALUED if (value := getattr(options, name))]
    switches = [_flag(name) for name in _SWITCHES if getattr(options, name)]
    models = ["--models", *options.models] if options.models else []
    return [*valued, *switches, *models]


def _flag(name: str) -> str:
    """Return the flag of an option by its name in the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def written(properties: str) -> str:
    """Return the path of a new configuration file that only this process has, also after `become_server`."""
    # A file with a name would be left in the folder: the server replaces the process that could delete it.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        file.write(properties)
        file.seek(0)
        descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    return f"/dev/fd/{descriptor}"


def serve_command(arguments: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command line of `torchere serve` with these arguments, run by the interpreter `python`."""
    # -P removes the current directory from the import path: a torch.py there must not be imported.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    return [python, *safe_path, "-m", "torchere.serving", "serve", *arguments]


def become_server(arguments: Sequence[str], python: str = sys.executable) -> NoReturn:
    """Replace this process by `torchere serve --ncs`, which then gets the signals of the container."""
    sys.stdout.flush()
    os.execv(python, serve_command(["--ncs", *arguments], python))


def refuse_packing_options(options: argparse.Namespace, reason: str, but: tuple[str, ...] = ()) -> None:
    """Raise LaunchRefused if an option for packing is given, which `reason` makes meaningless."""
    from torchere.archiver.model_flags import packing_defaults  # noqa: PLC0415 - of `torchere serve` only

    for name, default in packing_defaults().items():
        if name not in but and getattr(options, name) != default:
            raise LaunchRefused(f"{reason}, and {_flag(name)} says how a model is packed")


def plan_from(options: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Merge options, configuration file and environment.

    Raises:
        LaunchRefused: a given file or directory, or the current directory, does not exist; no model store is
            configured; or the snapshot is truncated.
        ConfigurationError: the configuration file can't be read, or holds an invalid value.
    """
    from torchere.serving.config.properties import read_properties  # noqa: PLC0415 - not needed for --help
    from torchere.serving.config.resolve import configure  # noqa: PLC0415 - not needed for --help
    from torchere.serving.config.server_settings import SnapshotSettings  # noqa: PLC0415 - likewise

    path = config_file(options.ts_config, environ, use_snapshots=not options.no_config_snapshots)
    _require_files(options)
    temp = environ.get("TEMP")
    if temp and not os.path.isdir(temp):
        raise LaunchRefused(f"Invalid temp directory: {temp}, please check TEMP environment variable.")
    entries = read_properties(path) if path else ()
    if path and (cut := cut_off(path, entries)):
        raise LaunchRefused(f"{path} is no whole snapshot: {cut}. Delete it, or start with --ncs.")
    defaults = old_defaults(environ) if options.old_defaults else {}
    configuration = configure(entries, environ, _overrides(options), defaults)
    settings = configuration.checked(str(path or "configuration"))
    _require_stores(settings.model_store, options.workflow_store)
    logs = log_directory(environ)
    snapshots = (
        None if options.no_config_snapshots else SnapshotSettings(logs / "config", configuration.effective)
    )
    any_may_register = settings.insecure_management is True and settings.allowed_urls == _LOCAL_CLIENTS_URLS
    settings = replace(
        settings,
        small_tls_keys=options.old_defaults,
        allowed_urls=() if any_may_register else settings.allowed_urls,
        temp_dir=Path(temp) if temp else None,
        snapshots=snapshots,
        quarantine_directory=settings.quarantine_directory or logs / "quarantine",
        metrics_directory=Path(environ.get("METRICS_LOCATION") or "logs").absolute(),
    )
    return Plan(settings, configuration, path, logs)


def config_file(option: str | None, environ: Mapping[str, str], *, use_snapshots: bool) -> Path | None:
    """Return the configuration file, or None if no file is named or found.

    The first of these applies: the file of the environment variable, that of the option `--ts-config`, the
    newest snapshot, then `./config.properties`.

    Raises:
        LaunchRefused: the file named by the environment or the option does not exist, or the folder of the
            snapshots can't be listed.
    """
    named = environ.get("TS_CONFIG_FILE") or option
    if named:
        if not os.path.isfile(named):
            raise LaunchRefused(f"--ts-config file not found: {named}")
        return Path(named)
    if use_snapshots and (snapshot := newest_snapshot(log_directory(environ) / "config")):
        return snapshot
    return DEFAULT_FILE if os.path.isfile(DEFAULT_FILE) else None


def log_directory(environ: Mapping[str, str]) -> Path:
    """Return the log and snapshot folder: `LOG_LOCATION`, or `logs` in the current directory.

    Raises:
        LaunchRefused: the current directory was deleted.
    """
    return current_directory() / (environ.get("LOG_LOCATION") or "logs")


def current_directory() -> Path:
    """Return the current directory, which a server needs; raise LaunchRefused if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError as err:
        raise LaunchRefused("The current directory is not there any more; start in another one.") from err


def newest_snapshot(directory: Path) -> Path | None:
    """Return the snapshot with the latest time in its name, because copying may change file times.

    Raises:
        LaunchRefused: the folder can't be listed. Without its models the server would write a newer snapshot.
    """
    if not os.path.isdir(directory):
        return None
    try:
        names = [path.name for path in directory.iterdir() if _SNAPSHOT_NAME.fullmatch(path.name)]
    except OSError as err:
        text = f"{directory} can't be read: {err.strerror}. Make the folder readable, or start with --ncs."
        raise LaunchRefused(text) from err
    return directory / max(names) if names else None


def cut_off(path: Path, entries: Sequence[Entry]) -> str:
    """Return the reason why a snapshot counts as truncated; "" if it is complete, or no snapshot by its name.

    TorchServe does not write snapshots atomically: a full disk leaves a truncated or empty file.
    """
    if not _SNAPSHOT_NAME.fullmatch(path.name):
        return ""
    if all(one.key != "model_snapshot" for one in entries):
        return "it names no models"
    # A truncated value may still be valid (for example an address), except the models, which are JSON.
    whole = entries[-1].key == "model_snapshot" or path.read_bytes().endswith((b"\n", b"\r"))
    return "" if whole else f"its last line, {entries[-1].key}, has no end"


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the command line options as keys of the configuration file."""
    given = {
        "model_store": options.model_store,
        "workflow_store": options.workflow_store,
        "load_models": ",".join(options.models or ()),
        "cpp_log_config": options.cpp_log_config,
        "plugins_path": options.plugins_path,
        "disable_token_authorization": options.disable_token_auth,
        "enable_model_api": options.enable_model_api,
        "log_files": options.log_files,
        "supervise": options.supervise,
    }
    return {key: "true" if value is True else value for key, value in given.items() if value}


def _require_files(options: argparse.Namespace) -> None:
    for flag, value in (("--log-config", options.log_config), ("--cpp-log-config", options.cpp_log_config)):
        if value and not os.path.isfile(value):
            raise LaunchRefused(f"{flag} file not found: {os.path.realpath(value)}")


def _require_stores(model_store: Path | None, workflow_store: str | None) -> None:
    if model_store is None:
        raise LaunchRefused("Missing mandatory parameter --model-store")
    if not os.path.isdir(model_store):
        raise LaunchRefused(f"--model-store directory not found: {model_store}")
    if workflow_store and not os.path.isdir(workflow_store):
        raise LaunchRefused(f"--workflow-store directory not found: {workflow_store}")
