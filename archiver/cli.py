"""The command lines: `torch-model-archiver`, and `torchere archive`, `convert` and `inspect`.

`torchere archive` has the flags of `torch-model-archiver`, and further flags that convert the model first.
Only the further flags need PyTorch. Only this module reads the environment (SOURCE_DATE_EPOCH) and prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torchere.archiver.arguments import Parser
from torchere.archiver.commands import PrepareFor, convert_archive, pack_model, packed_line, prepared
from torchere.archiver.errors import ArchiveError, EndedBySignal, ModelRefused, PackingError, plainly
from torchere.archiver.inspection import inspect_archive
from torchere.archiver.manifest import DEFAULT_VERSION, EPOCH_S, VERSION_RULE, is_version
from torchere.archiver.model_flags import add_archive_arguments, build_options, wants_model
from torchere.archiver.request import (
    BUILT_IN_HANDLERS,
    DEFAULT_HANDLER,
    KEEP,
    ArchiveRequest,
    check_inputs,
    check_model_name,
    check_python,
)
from torchere.archiver.scan import weights as kinds
from torchere.archiver.writer import Progress, write_archive

_SUFFIX_OF = {  # a server selects the loader by the suffix
    kinds.TORCHSCRIPT: ".pt",
    kinds.EXPORTED_PROGRAM: ".pt2",
    kinds.AOTINDUCTOR: ".pt2",
    kinds.ONNX: ".onnx",
}
_NEED_A_CLASS = {kinds.TORCH_SAVE, kinds.PICKLE, kinds.SAFETENSORS}
_LATEST_EPOCH_S = 253402300799  # the last second of 9999, the last year that Python's dates support
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torch-model-archiver`; return TorchServe's exit codes: 0, 1 on failure, 2 on wrong arguments."""
    parser = Parser(
        prog="torch-model-archiver", description="Pack a model and its handler into an archive for serving."
    )
    add_archive_arguments(parser)
    namespace = parser.parse_args(argv)
    try:
        with tidy_when_ended():
            return run_archive(namespace)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_archive(namespace: argparse.Namespace) -> int:
    """Run `torch-model-archiver`: write the archive; print one error and return 1 when that fails."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    try:
        request = _request(namespace)
        write_archive(request, Progress(sys.stderr))
        _warn_of_faults(request)
    except (PackingError, OSError) as error:
        # The same text as TorchServe's archiver prints.
        kind = "FileNotFoundError: " if isinstance(error, FileNotFoundError) else ""
        print(f"torch-model-archiver: {kind}{error}", file=sys.stderr)
        return 1
    return 0


def _warn_of_faults(request: ArchiveRequest) -> None:
    """Print a warning about Python that does not compile, weights that do not load, and a refused version.

    These are packed all the same, as by TorchServe's archiver.
    """
    for check in (check_python, check_weights, check_version):
        try:
            check(request)
        except PackingError as error:
            print(f"torch-model-archiver: warning: {error}", file=sys.stderr)


def run_model_archive(
    namespace: argparse.Namespace,
    prepare_for: PrepareFor | None = None,
    command: str = "torchere archive",
    check_config: Callable[[Path], object] | None = None,
) -> int:
    """Run `torchere archive`: convert the model if a flag asks for it, and write the archive.

    `prepare_for` returns the function by which an archive's handler turns a request body into model inputs.
    `command` is the prefix of error lines. `check_config` raises ModelRefused for a model-config.yaml that a
    server would refuse.

    Returns 0, 1 on failure, or 2 when a model, an example or an option is refused.
    """
    logging.basicConfig(format="%(levelname)s - %(message)s")

    def pack() -> object:
        options = build_options(namespace) if wants_model(namespace) else None
        namespace.handler = namespace.handler or DEFAULT_HANDLER
        request = _request(namespace)
        if check_config and request.config_file and Path(request.config_file).is_file():
            check_config(Path(request.config_file))
        if options is not None:
            options = prepared(options, request, prepare_for)
            return pack_model(request, options, Progress(sys.stderr), _say)
        check_inputs(request)
        check_weights(request)
        path = write_archive(request, Progress(sys.stderr))
        _say(packed_line(path))
        return path

    return _status_of(command, pack)


def run_convert(namespace: argparse.Namespace, prepare_for: PrepareFor | None = None) -> int:
    """Run `torchere convert`; see `run_model_archive` for the arguments.

    Returns 0, 1 on failure, or 2 when an archive or a model is refused.
    """
    logging.basicConfig(format="%(levelname)s - %(message)s")

    def convert() -> object:
        namespace.epoch_s = source_epoch()
        return convert_archive(namespace, _say, prepare_for)

    return _status_of("torchere convert", convert)


def _status_of(command: str, action: Callable[[], object]) -> int:
    """Run the action and return the exit status; print one line for an error."""
    try:
        with tidy_when_ended():
            action()
    except (ModelRefused, ArchiveError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except (PackingError, OSError) as error:
        print(f"{command}: {plainly(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere inspect` to `parser`."""
    parser.add_argument("archive", help="a .mar, a .war, a .tar.gz or a directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_inspect(namespace: argparse.Namespace) -> int:
    """Print the archive's report, with its changed files; print a line and return 1 if it is unusable."""
    try:
        report = inspect_archive(namespace.archive)
    except (ArchiveError, OSError) as error:
        print(f"torchere inspect: {plainly(error)}", file=sys.stderr)
        return 1
    print(report.as_json() if namespace.json else report.as_text())
    return 0


def check_weights(request: ArchiveRequest) -> None:
    """Check that a built-in handler can load the unchanged model file, by its name and bytes.

    Files of an unknown format pass.

    Raises:
        PackingError: the file needs another suffix or the model's class, or this class is in a file that a
            server can't import.
        OSError: the file can't be read.
    """
    path = Path(request.serialized_file or "")
    is_built_in = request.handler in BUILT_IN_HANDLERS and request.runtime != "LSP"
    if is_built_in and request.model_file:
        check_model_name(Path(request.model_file))
    if not is_built_in or request.model_file or not path.is_file():
        return
    kind = kinds.classify_file(path).kind
    if kind in _NEED_A_CLASS:
        raise PackingError(
            f"--serialized-file {path}: found {kind} without the class of its model; the handler "
            f"{request.handler!r} expects TorchScript, a .pt2, ONNX, or weights with their class: give the "
            "file of the class (--model-file), or convert the model (--format torchscript)"
        )
    suffix = _SUFFIX_OF.get(kind, path.suffix)
    if path.suffix != suffix:
        raise PackingError(
            f"--serialized-file {path}: found {kind} under the suffix {path.suffix!r}, and a server expects "
            f"{suffix}; rename the file, or give --format {KEEP}"
        )


def check_version(request: ArchiveRequest) -> None:
    """Raise PackingError for a version that torchere's server refuses; an empty one means the default."""
    version = request.version or DEFAULT_VERSION
    if not is_version(version):
        raise PackingError(
            f"--version {version[:80]!r}: torchere's server refuses this archive; expected {VERSION_RULE}"
        )


def _request(namespace: argparse.Namespace) -> ArchiveRequest:
    extra = namespace.extra_files.split(",") if namespace.extra_files else ()
    return ArchiveRequest(
        model_name=namespace.model_name,
        version=namespace.version,
        handler=namespace.handler,
        serialized_file=namespace.serialized_file,
        model_file=namespace.model_file,
        extra_files=tuple(item for item in extra if item.strip()),
        requirements_file=namespace.requirements_file,
        config_file=namespace.config_file,
        runtime=namespace.runtime,
        export_path=namespace.export_path,
        archive_format=namespace.archive_format,
        force=namespace.force,
        epoch_s=source_epoch(),
    )


def source_epoch() -> int:
    """Return the seconds of SOURCE_DATE_EPOCH (reproducible-builds.org), or the fixed date if it is empty."""
    if not (text := os.environ.get("SOURCE_DATE_EPOCH")):
        return EPOCH_S
    if not (text.isascii() and text.isdigit()) or int(text[:20]) > _LATEST_EPOCH_S:
        raise PackingError(f"SOURCE_DATE_EPOCH is {text!r}; set it to whole seconds since 1970, or unset it")
    return int(text)


@contextmanager
def tidy_when_ended() -> Iterator[None]:
    """Exit by an exception on SIGTERM or SIGHUP, so that partial output is removed; main thread only.

    SIGHUP is sent when the terminal is closed. A signal that is ignored (nohup) stays ignored.
    """
    found = {number: signal.getsignal(number) for number in _ENDS}
    before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise EndedBySignal(128 + number)
