"""`torchere join`: this machine runs ranks of a group whose leader is a server on another machine."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torchere.archiver.arguments import described
from torchere.serving.commands.serve_options import LaunchRefused, config_file, refuse_windows
from torchere.serving.config.kinds import MAX_PORT
from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure
from torchere.serving.config.server_settings import Address, RendezvousSettings
from torchere.serving.logs.lines import LEVELS, TextFormatter
from torchere.serving.process.allocator import keep_freed_memory
from torchere.serving.workers.spawn import spin_bound


def add_join(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere join` to `parser`."""
    text = "Run the ranks of this machine for a model that a server on another machine leads."
    described(parser, text, "torchere join leader.example --model-store store --secret-file secret")
    add = parser.add_argument
    port = RendezvousSettings().port
    add("leader", metavar="HOST[:PORT]", help=f"rendezvous of the leader (default port: {port})")
    add("--model-store", metavar="DIR", help="directory with the same archives as the leader's")
    add("--secret-file", metavar="FILE", help="rendezvous_secret_file, the same as the leader's")
    add("--ts-config", metavar="FILE", help="properties file: model store, sandbox, limits, rendezvous_*")
    add("--log-level", default="INFO", type=str.upper, choices=LEVELS, help="default: INFO")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> NoReturn:
    """Run the ranks of this machine until a signal."""
    refuse_windows()
    host, port = address_of(options.leader)
    keep_freed_memory(os.environ)
    handler = logging.StreamHandler(sys.stdout)  # without a thread, which would not survive a fork
    handler.setFormatter(TextFormatter())
    logging.basicConfig(level=options.log_level, handlers=[handler])
    logging.captureWarnings(True)
    path = config_file(options.ts_config, os.environ, use_snapshots=False)
    overrides = {"model_store": options.model_store, "rendezvous_secret_file": options.secret_file}
    given = {name: value for name, value in overrides.items() if value}
    configuration = configure(read_properties(path) if path else (), os.environ, given)
    settings = configuration.checked(str(path or "configuration"))
    if settings.model_store is None or not Path(settings.model_store).is_dir():
        raise LaunchRefused(f"--model-store: found {settings.model_store}, expected a directory of archives")
    signal.signal(signal.SIGTERM, _end)
    os.environ.update(spin_bound(os.environ))  # OpenMP reads its variable when torch is imported
    from torchere.serving.workers.member import Member  # noqa: PLC0415 - torch: not before the arguments are right
    from torchere.serving.workers.rendezvous import secret_of  # noqa: PLC0415 - likewise

    secret = secret_of(settings.rendezvous, needed=not Address(host).is_local)
    Member(settings, host, port, secret).serve()


def address_of(text: str) -> tuple[str, int]:
    """Split HOST[:PORT]; an IPv6 address with a port stands in brackets.

    Raises:
        LaunchRefused: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not text.startswith("[")):
        host, port = text, str(RendezvousSettings().port)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise LaunchRefused(f"found {text!r}, expected HOST or HOST:PORT of the leader's rendezvous")
    return host, int(port)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)  # `finally` blocks end the ranks
