"""Converts a model and packs it; torch is imported here only when the first model is built."""

from __future__ import annotations

import argparse
import importlib.util
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchere.archiver.container.entries import MANIFEST_NAME
from torchere.archiver.errors import ModelRefused, naming_files_of
from torchere.archiver.huggingface_texts import add_texts, check_texts
from torchere.archiver.manifest import DEFAULT_VERSION, VERSION_RULE, is_version
from torchere.archiver.model_flags import add_build_arguments, conversion_options, version_name
from torchere.archiver.reader import Archive, open_archive
from torchere.archiver.request import (
    BUILT_IN_HANDLERS,
    DEFAULT_HANDLER,
    FALLBACK_NAME,
    ArchiveRequest,
    BuildOptions,
    Built,
    Prepare,
    check_inputs,
    handler_files,
)
from torchere.archiver.signature import SIGNATURE_NAME, common_limit, read_signature
from torchere.archiver.writer import Progress, check_target, write_archive

_BATCH_SIZE = re.compile(r"""^["']?batchSize["']?[ \t]*:[ \t]*["']?(\d+)""", re.MULTILINE)
# Handlers that pass all rows of a batch to the model in one tensor; `tensor` passes no more than it takes.
_STACKING = frozenset({"base_handler", "densenet_handler", "image_classifier", "image_segmenter"})
Say = Callable[[str], None]
# Returns the function by which a handler turns the body of a request into inputs. The arguments are the
# handler as in the manifest, the folder of its file (None if it is built in), and the model-config.yaml, if
# there is one.
PrepareFor = Callable[[str, Path | None, Path | None], Prepare]


def prepared(options: BuildOptions, request: ArchiveRequest, prepare_for: PrepareFor | None) -> BuildOptions:
    """Return the options with the function by which the handler prepares bodies, for example and samples."""
    if prepare_for is None or not request.handler or request.runtime == "LSP":
        return options
    file = request.handler_file()
    name = request.handler if file is None else Path(request.handler).name
    config = Path(request.config_file) if request.config_file else None
    return replace(options, prepare=prepare_for(name, file.parent if file else None, config))


def pack_model(request: ArchiveRequest, options: BuildOptions, progress: Progress, say: Say) -> Path:
    """Build the model of `options`, pack it with the rest of `request` and return the archive's path.

    The serialized file, model file and configuration of `request` are replaced by those of the built model.

    Raises:
        ModelRefused: the model, an example or an option can't be used, or PyTorch is not installed.
        PackingError: see `write_archive`; checks that do not need the model run before it is built.
        OSError: a file can't be read or written.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModelRefused("this needs PyTorch, and it is not installed; pip install torch")
    request.check()
    check_target(request)
    check_inputs(request)
    check_texts(request, options.serialized_file)
    with signals_held():
        from torchere.archiver.models.build import build  # noqa: PLC0415  # torch

    with tempfile.TemporaryDirectory(prefix="torchere-") as folder:
        built = build(options, Path(folder), say)
        if request.handler == DEFAULT_HANDLER:
            _refuse_unservable(built)
        if request.handler in _STACKING:
            _warn_of_larger_batches(request.handler, built, say)
        add_texts(request, options.serialized_file, built.beside)
        packed = replace(
            request,
            serialized_file=built.serialized_file,
            model_file=built.model_file,
            config_file=built.config_file,
            extra_files=(*request.extra_files, *built.extra_files),
            made=built.beside,
        )
        path = write_archive(packed, progress)
    say(packed_line(path))
    return path


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold back Ctrl+C and the signals that end a process until the end of the block, which imports torch.

    While torch's C code imports NumPy, it drops the exception that such a signal raises.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # raises the exception of a held signal


def packed_line(path: Path) -> str:
    """Return a line with the path and the size of a new archive."""
    if not path.is_file():
        return f"packed: {path}"
    size = path.stat().st_size
    return f"packed: {path} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"packed: {path} ({size / 1e3:.0f} kB)"


def _warn_of_larger_batches(handler: str, built: Built, say: Say) -> None:
    """Tell the user if `batchSize` of the configuration exceeds the rows that the model takes at once."""
    config = built.config_file
    asked = _BATCH_SIZE.search(config.read_text(encoding="utf-8")) if config else None
    signature = read_signature(built.beside)
    inputs = [spec for spec in signature.inputs if spec.shape] if signature else []
    most = [common_limit(spec.limits_of(0)).most if spec.batched else spec.shape[0] for spec in inputs]
    rows = min((size for size in most if size), default=None)
    if config and asked and rows and int(asked[1]) > rows:
        say(
            f"warning: {config.name} has batchSize: {asked[1]}, and the model takes {rows} in its first "
            f"dimension: larger batches, which {handler} gives it, fail and run again one by one, or mix "
            f"requests; set batchSize to {rows} at most, or give --dynamic-batch 1:{asked[1]} if rows are "
            "independent"
        )


def _refuse_unservable(built: Built) -> None:
    """Raise ModelRefused when the signature has a datatype that the default handler can't carry."""
    signature = read_signature(built.beside)
    if signature is None:
        return
    reasons = {"BYTES": f"texts, and the handler {DEFAULT_HANDLER!r} knows numbers only"}
    if built.serialized_file is not None and built.serialized_file.suffix == ".onnx":
        reasons["BF16"] = "BF16, which onnxruntime's NumPy arrays do not have"
    roles = (("input", "takes", signature.inputs), ("output", "gives", signature.outputs))
    for role, does, specs in roles:
        for spec in specs:
            if spec.datatype in reasons:
                raise ModelRefused(
                    f"{built.serialized_file}: the {role} {spec.name!r} {does} {reasons[spec.datatype]}; "
                    "name a --handler of your own"
                )


EXAMPLES = """\
examples:
  an archive of TorchServe, which has no signature.json to tell what the model takes:
    torchere convert old.mar --to export --example input.json --dynamic-batch 1:64 -o new.mar
  an archive that has one:
    torchere convert old.mar --to export --dynamic-batch 1:64 -o new.mar
"""


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere convert` to `parser`."""
    add = parser.add_argument
    add("archive", type=Path, metavar="OLD.mar", help="a .mar, a .tar.gz or a directory")
    add("-o", "--output", type=Path, required=True, metavar="NEW.mar", help="the new archive")
    add("-f", "--force", action="store_true", help="overwrite an existing archive")
    told = "version of the new archive (default: the old one's)"
    add("-v", "--version", type=version_name, metavar="V", help=told)
    add(
        "--handler",
        metavar="H",
        help=f"handler for it: {', '.join(BUILT_IN_HANDLERS)}, or a Python file (default: the old one's, or "
        f"{DEFAULT_HANDLER})",
    )
    add(
        "--allow-code",
        action="store_true",
        help="run the Python of the archive: the class of its model, and its handler to prepare a picture",
    )
    add_build_arguments(parser, "--to")


def refuse_code(_body: bytes) -> NoReturn:
    """Refuse to prepare a body, for a handler whose code may not be run; see `Prepare`."""
    raise ValueError(
        "the archive's own handler prepares pictures, and that runs its code; say --allow-code if you trust "
        "the archive, or give what the model takes, as .npy or .pt"
    )


def convert_archive(namespace: argparse.Namespace, say: Say, prepare_for: PrepareFor | None = None) -> Path:
    """Convert an archive according to the arguments; return the path of the new archive.

    Raises:
        ArchiveError: the old archive can't be used.
        ModelRefused: the old archive's model can't be used.
        PackingError, OSError: the new archive can't be written.
    """
    old = open_archive(namespace.archive)
    manifest = old.manifest
    if manifest.model_file and not namespace.allow_code:
        raise ModelRefused(
            f"{old.path}: its model is a class in {manifest.model_file}, and converting runs that file; say "
            "--allow-code if you trust the archive"
        )
    if not manifest.model_file and not manifest.serialized_file:
        raise ModelRefused(
            f"{old.path}: it holds no model, only the handler {manifest.handler}; give the model that the "
            "handler makes to torchere archive (--factory, or --model-file)"
        )
    with tempfile.TemporaryDirectory(prefix="torchere-") as work:
        folder = old.extract(Path(work) / "old")
        return _converted(namespace, old, folder, say, prepare_for)


def _converted(
    namespace: argparse.Namespace,
    old: Archive,
    folder: Path,
    say: Say,
    prepare_for: PrepareFor | None,
) -> Path:
    manifest = old.manifest
    advice = (
        f"to change a file, or for flags that convert lacks, unpack {old.path} and pack its files again by "
        "torchere archive"
    )
    with naming_files_of(old.path, folder, advice):
        # Compiled code can't be compiled again, but its archive also holds the program that it was made from.
        weights = FALLBACK_NAME if (folder / FALLBACK_NAME).is_file() else manifest.serialized_file
        options = replace(
            conversion_options(namespace),
            serialized_file=_in(folder, weights),
            model_file=_in(folder, manifest.model_file),
            config_file=_in(folder, manifest.config_file),
        )
        if (folder / SIGNATURE_NAME).is_file():
            options = replace(options, example_signature=folder / SIGNATURE_NAME)
        request = _request(namespace, old, folder)
        # The new archive takes its configuration from the options.
        configured = replace(request, config_file=options.config_file)
        if namespace.allow_code or request.handler_file() is None:
            options = prepared(options, configured, prepare_for)
        else:
            options = replace(options, prepare=refuse_code)
        return pack_model(
            request,
            options,
            Progress(sys.stderr),
            lambda line: say(line.replace(str(folder), str(old.path))),
        )


def _request(namespace: argparse.Namespace, old: Archive, folder: Path) -> ArchiveRequest:
    manifest = old.manifest
    output: Path = namespace.output
    request = ArchiveRequest(
        model_name=manifest.model_name or output.name.partition(".")[0],
        version=_version(namespace, old),
        handler=namespace.handler or manifest.handler or DEFAULT_HANDLER,
        requirements_file=_in(folder, manifest.requirements_file),
        unpacked=folder,
        runtime=manifest.runtime,
        export_path=output.parent,
        output=output,
        archive_format="tgz" if output.name.endswith((".tar.gz", ".tgz")) else "default",
        force=namespace.force,
        epoch_s=namespace.epoch_s,
    )
    anew = {SIGNATURE_NAME, FALLBACK_NAME, manifest.serialized_file, manifest.config_file}
    given = request.handler_file() if namespace.handler else None
    if given is not None and given.is_file():  # the user's file replaces the archive's file of that name
        anew.add(given.name)
    elif any((folder / name).is_file() for name in handler_files(request.handler, manifest.runtime)):
        request = replace(request, handler=str(folder / request.handler))
    if request.handler_file() is None:
        anew.add(manifest.model_file)  # only a handler's own code needs the class
    about = f"{MANIFEST_NAME.rpartition('/')[0]}/"
    kept = (entry.name for entry in old.entries if entry.name not in anew)
    files = tuple(folder / name for name in kept if not name.startswith(about))
    return replace(request, extra_files=files)


def _version(namespace: argparse.Namespace, old: Archive) -> str:
    """Return the version of the new archive; raise ModelRefused if servers refuse the old one's."""
    version: str = namespace.version or old.manifest.model_version or DEFAULT_VERSION
    if not is_version(version):
        raise ModelRefused(
            f"{old.path}: its version is {version[:80]!r}, and a server refuses it; expected {VERSION_RULE}: "
            "give another by --version"
        )
    return version


def _in(folder: Path, name: str | None) -> Path | None:
    return folder / name if name else None
