"""Fuzz targets for files: archives, manifests, model configs and `config.properties`."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchere.archiver.container.entries import problem_with
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, ArchiveError, ArchiveLimits, open_archive
from torchere.serving.config.model_properties import unsupported_keys
from torchere.serving.config.model_settings import Asked, effective_settings, parse_model_config
from torchere.serving.config.properties import (
    ConfigurationError,
    Entry,
    parse_properties,
    read_properties,
    substitute,
)
from torchere.serving.config.resolve import configure, report
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.config.workflow_spec import MAX_STEPS, check_functions, read_workflow_spec
from torchere.serving.errors import InvalidArchive, InvalidWorkflow
from torchere.serving.store.package import _check_sendable
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.messages import Load, control_to_worker, encode_frame, load_of

SHARED_MEMORY = Path("/dev/shm")  # files there never wait for a disk
PLACE = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
LIMITS = ArchiveLimits(max_entries=50, max_total_bytes=2**20, max_manifest_bytes=2**16)
MANIFEST = {
    "createdOn": "01/01/1980 00:00:00",
    "runtime": "python",
    "model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py:handle", "configFile": "c.yaml"},
    "archiverVersion": "0.12.0",
}
FILES = {"h.py": b"def handle(data, context): pass\n", "code/c.yaml": b"batchSize: 2\n", "w.bin": bytes(40)}


def zip_archive(data: bytes) -> None:
    """Open, unpack and verify the bytes as a file; Python's `zipfile` reads the same files, or none."""

    def other_reader(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            files = [info for info in archive.infolist() if not info.is_dir()]
            return {info.filename.removeprefix("./"): archive.read(info) for info in files}

    _archive(data, other_reader)


def tar_archive(data: bytes) -> None:
    """As `zip_archive`, for the bytes of a tar, which are compressed here: gzip's checksum stops a fuzzer."""

    def other_reader(path: Path) -> dict[str, bytes]:
        found, roots = {}, set()
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                name = member.name.removeprefix("./")
                roots.add(name.partition("/")[0])
                if member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = file.read()
        if len(roots - {"MAR-INF"}) == len(roots) == 1:  # a folder around everything is dropped
            return {name.partition("/")[2] or name: content for name, content in found.items()}
        return found

    _archive(gzip.compress(data, 1, mtime=0), other_reader)


def _archive(data: bytes, other_reader: Callable[[Path], dict[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        path, target = Path(folder, "x.mar"), Path(folder, "out")
        path.write_bytes(data)
        try:
            archive = open_archive(path, LIMITS)
            archive.extract(target)
        except ArchiveError:
            assert [each.name for each in Path(folder).iterdir()] == ["x.mar"], "a refusal left files"
            return
        found = {
            str(each.relative_to(target)): each.read_bytes() for each in target.rglob("*") if each.is_file()
        }
        _check(archive, found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                others = other_reader(path)
            except Exception:  # any reader may be stricter
                return
        assert others == found, "another reader finds other files"


def _check(archive: Archive, found: dict[str, bytes]) -> None:
    """The unpacked folder holds the files that the archive lists, within the archive's limits."""
    assert {entry.name: entry.size for entry in archive.entries} == {
        name: len(content) for name, content in found.items()
    }
    assert not any(problem_with(name) for name in found)
    assert sum(map(len, found.values())) <= LIMITS.max_total_bytes
    assert len(found) <= LIMITS.max_entries
    archive.verify()


def zip_seeds() -> list[bytes]:
    """A packed model, an empty zip, and zips with stored entries, descriptors and 64-bit sizes."""
    files = {**FILES, "MAR-INF/MANIFEST.json": json.dumps(MANIFEST).encode()}
    return [_zip(files, zipfile.ZIP_DEFLATED), _zip({}, 0), _zip(FILES, zipfile.ZIP_STORED), _streamed_zip()]


def _zip(files: dict[str, bytes], method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def _streamed_zip() -> bytes:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise OSError("a pipe")

    buffer = Pipe()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("a", "w", force_zip64=True) as file:
        file.write(b"streamed")
    return buffer.getvalue()


def tar_seeds() -> list[bytes]:
    """Tars in the three formats, and one with links and a device."""
    files = {"MAR-INF/MANIFEST.json": json.dumps(MANIFEST).encode(), "h.py": FILES["h.py"]}
    seeds = [_tar(files, kind) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (("s", tarfile.SYMTYPE), ("l", tarfile.LNKTYPE), ("d", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../outside"
            archive.addfile(member)
    return [*seeds, buffer.getvalue()]


def _tar(files: dict[str, bytes], kind: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name if kind == tarfile.USTAR_FORMAT else f"{'n' * 120}/{name}é")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def manifest(data: bytes) -> None:
    """A manifest, or ArchiveError; writing it and reading it again changes nothing."""
    try:
        found = Manifest.parse(data.decode("utf-8", "replace"), "x.mar")
    except ArchiveError:
        return
    assert repr(Manifest.parse(found.dump(), "x.mar")) == repr(found)  # NaN equals nothing
    for name in (found.serialized_file, found.model_file, found.requirements_file, found.config_file):
        assert name is None or problem_with(name) is None


def manifest_seeds() -> list[bytes]:
    """Manifests of our packer and of others."""
    digests = {"torchere": {"digests": {"h.py": "sha256:" + "0" * 64}}, "later": [1, None]}
    numbers = {"runtime": "LSP", "model": {"modelVersion": 1.10, "modelName": "é", "extra": {}}}
    return [json.dumps(each).encode() for each in (MANIFEST, {**MANIFEST, **digests}, numbers, {})]


def model_config(data: bytes) -> None:
    """A model config, or InvalidArchive; it resolves to settings, and reaches a worker as it was read."""
    try:
        config = parse_model_config(data.decode("utf-8", "replace"))
        _check_sendable("model config", config.raw)  # as at registration
    except InvalidArchive:
        return
    unsupported_keys(config.raw)
    settings = effective_settings(Asked(), config, {}, ServerSettings(), gpus=2)
    assert settings.batch.max_batch_size >= 1
    assert 0 <= settings.min_executors <= settings.max_executors
    spec = LoadSpec("m", "1", "/x", "h", {"model": {"configFile": "c.yaml"}}, config.raw)
    message = load_of(spec, (None,), "")
    read = control_to_worker.decode(encode_frame(message)[4:])
    assert isinstance(read, Load)
    said = read.spec.model_config if not read.config_file else config.raw
    assert repr(said) == repr(config.raw)


def model_config_seeds() -> list[bytes]:
    """Configs with every key, with YAML's types, anchors, tags, and dates."""
    return [
        b"minWorkers: 1\nmaxRetryTimeoutInSec: 0\nstartupTimeout: 1\nclientTimeoutInMills: 5\n"
        b"jobQueueSize: 9\nuseJobTicket: yes\nsequenceTimeoutMSec: 2\n"
        b"maxSequenceJobQueueSize: 3\nparallelType: pp\n",
        b"minWorkers: 1\nmaxWorkers: 4\nbatchSize: 8\nmaxBatchDelay: 50\nresponseTimeout: 120\n"
        b"deviceType: gpu\ndeviceIds: [0, 1]\nisolation: process\ndispatch: eager\n",
        b"sequenceBatching: true\nsequenceMaxIdleMSec: 9\nmaxNumSequence: 4\ncontinuousBatching: false\n",
        b"a: &x {b: [1, 2.5, 1e3, 0x1f, 0o7, 1:30, .nan, ~]}\nc: *x\nd: 2020-01-02T03:04:05Z\n<<: {e: f}\n",
        b"%YAML 1.1\n---\n? [a]\n: |\n  text\n  more\n...\n",
        b"!!set {a, b}\n",
        b"a: !!binary aGVsbG8=\nb: !!omap [c: 1]\nd: !!python/object:os.system x\n",
    ]


def workflow(data: bytes) -> None:
    """A specification of a workflow, or InvalidWorkflow; parents come before their children."""
    try:
        spec = read_workflow_spec(data.decode("utf-8", "replace"))
        check_functions(spec, "h.py", "from elsewhere import *")
    except InvalidWorkflow:
        return
    places = {name: place for place, name in enumerate(spec.steps)}
    assert len(places) <= MAX_STEPS
    assert all(places[above] < places[name] for name, parents in spec.parents.items() for above in parents)
    assert sum(not parents for parents in spec.parents.values()) == 1
    assert spec.leaves
    assert all(step.min_workers >= 0 and step.timeout_ms >= 1 for step in spec.steps.values())


def workflow_seeds() -> list[bytes]:
    """A chain, a diamond, and settings."""
    return [
        b"models:\n  min-workers: 1\n  m: {url: m.mar, timeout-ms: 5}\ndag:\n  before: [m]\n  m: [after]\n",
        b"dag: {a: [b, c], b: [d], c: [d, e]}\n",
    ]


def properties(data: bytes) -> None:
    """Entries or ConfigurationError; escaped, they are read again; they resolve to settings and findings."""
    with tempfile.NamedTemporaryFile(dir=PLACE) as file:
        file.write(data)
        file.flush()
        try:
            entries = read_properties(Path(file.name))
        except ConfigurationError:
            return
    again = parse_properties("".join(map(_escaped, entries)))
    assert [(each.key, each.value) for each in again] == [(each.key, each.value) for each in entries]
    for entry in entries:
        try:
            assert "\0" not in entry.key + substitute(entry, {"A": "1"})
        except ConfigurationError:
            continue
    configuration = configure(entries, {"A": "1"})
    assert all("\n" not in str(finding) for finding in configuration.findings)
    report(Path("config.properties"), replace(configuration))


def _escaped(entry: Entry) -> str:
    return f"{_units(entry.key)}={_units(entry.value)}\n"


def _units(text: str) -> str:
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def properties_seeds() -> list[bytes]:
    """Files as operators write them, and the grammar's corners."""
    return [
        b"inference_address=http://0.0.0.0:8080\nmanagement_address=unix:/tmp/x\nload_models=all\n"
        b"job_queue_size=100\nmax_request_size=6553500\nallowed_urls=https://a/.*,file://b\n"
        b"cors_allowed_origin=*\nenable_envvars_config=true\ndisable_token_authorization=$$A$$\n",
        b'models={"m": {"1.0": {"defaultVersion": true, "marName": "m.mar", "minWorkers": 1, '
        b'"batchSize": 4}}}\nmodel_snapshot={"name": "s", "modelCount": 1, "models": {}}\n',
        b"# comment\n! other\n  a b\nc\\ d : e\\\n   f\\t\\u00e9\\uD83D\\uDE00\n\\= = \\\\\n",
    ]
