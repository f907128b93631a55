"""Reads objects of S3 by ranges of bytes, several at once, with botocore (extra `s3`).

Credentials, region, endpoint, proxies and retries are set as for AWS's tools: by variables, files and roles.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from torchere.archiver.errors import ModelRefused

logger = logging.getLogger(__name__)

AT_ONCE = 16  # concurrent requests; S3 sends some 90 MB/s for each
PART_BYTES = 8 << 20  # limit of one request, as AWS advises; smaller ones spend most time waiting for S3
_STEP_BYTES = 1 << 18  # limit of one read from a response, because botocore holds a copy of the bytes
_ATTEMPTS = 5  # for a response whose body breaks off; botocore retries a request without a response
_PAUSE_S = 0.2  # before the second attempt; doubled before each further one
_EVERY_S = 10.0  # between two log lines about the progress


class ObjectMissing(ModelRefused):
    """There is no such object, or the credentials do not permit reading it."""


class Piece(NamedTuple):
    """A range of bytes in an object, and the memory to read it into."""

    name: str  # see `Objects.url_of`
    start: int
    into: memoryview  # a view of bytes; its length is that of the range


class _Version(NamedTuple):
    size: int
    etag: str


class _Stopped(Exception):
    """Another request has failed."""


class _BrokenOff(Exception):
    """The body of a response ended early."""


def session() -> Any:
    """Return a session of botocore, with the region in `AWS_REGION` where botocore finds none.

    Other SDKs of AWS read that variable, so it may be the only one that is set.

    Raises:
        ImportError: botocore is not installed.
    """
    import botocore.session  # noqa: PLC0415 - an extra, and slow to import

    found = botocore.session.get_session()
    region = os.environ.get("AWS_REGION")
    if region and not found.get_config_variable("region"):
        found.set_config_variable("region", region)
    return found


class Objects:
    """The objects below a URL of S3. Thread-safe. Call `close` after use.

    The version (ETag) of an object is requested once, and bytes of another version are refused.

    Args:
        url: `s3://bucket/key` with a percent-encoded key.

    Raises:
        ModelRefused: botocore is not installed, or is not configured.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._bucket, self._key = parts.netloc, unquote(parts.path).lstrip("/")
        self.requests = self.bytes = 0
        self.expected_bytes = 0  # for lines about the progress
        self._lock = threading.Lock()  # guards the counters and `_looking`
        self._looking: dict[str, threading.Lock] = {}  # by name; held while the version is requested
        self._versions: dict[str, _Version] = {}
        self._stopped = False
        self._began_s = time.monotonic()
        try:
            import botocore.exceptions  # noqa: PLC0415 - an extra, and slow to import
            from botocore.config import Config  # noqa: PLC0415

            self._errors = botocore.exceptions
            config = Config(signature_version="s3v4", max_pool_connections=AT_ONCE)
            self._client = session().create_client("s3", config=config)
        except ImportError as error:
            raise ModelRefused(f"{url}: it needs botocore: pip install 'torchere[s3]'") from error
        except (self._errors.BotoCoreError, ValueError) as error:
            raise self._refused("", error) from error
        self._pool = ThreadPoolExecutor(AT_ONCE, "s3")

    def close(self) -> None:
        """End the requests that are under way, without waiting for them."""
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def url_of(self, name: str) -> str:
        """Return the URL of the object `name` in the folder `url`; the name "" gives `url` itself."""
        return f"{self.url}/{name}" if name else self.url

    def size(self, name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            ObjectMissing: there is no such object.
            ModelRefused: the object can't be read.
        """
        return self._version(name).size

    def etags(self) -> dict[str, str]:
        """Return the versions of the objects that were read."""
        return {name: version.etag for name, version in self._versions.items()}

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of an object, in one request; raises as `fill`."""
        found = bytearray(length)
        self.fill(name, start, [memoryview(found)])
        return bytes(found)

    def read_all(self, name: str, most_bytes: int) -> bytes:
        """Return a whole object; raises as `fill`, and if the object has more than `most_bytes`."""
        size = self.size(name)
        if size > most_bytes:
            raise ModelRefused(f"{self.url_of(name)}: larger than {most_bytes} bytes: {size}")
        found = bytearray(size)
        self.run(self.jobs([Piece(name, 0, memoryview(found))]))
        return bytes(found)

    def jobs(self, pieces: Iterable[Piece]) -> Iterator[Callable[[], None]]:
        """Yield jobs that read the pieces: adjacent pieces together, large ones in parts."""
        for name, start, views in _requests(sorted(pieces, key=lambda piece: (piece.name, piece.start))):
            yield partial(self.fill, name, start, views)

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Do jobs in threads, `AT_ONCE` at a time; the first failure ends the others, and is raised."""
        left = {self._pool.submit(job) for job in jobs}
        while left:
            done, left = wait(left, timeout=_EVERY_S, return_when=FIRST_EXCEPTION)
            failures = [failure for each in done if (failure := each.exception()) is not None]
            if failures:
                self.close()
                raise next((each for each in failures if not isinstance(each, _Stopped)), failures[0])
            if left:
                logger.info("%s", self.progress())

    def progress(self) -> str:
        """Return a line about the bytes received so far."""
        seconds = max(time.monotonic() - self._began_s, 1e-3)
        whole = f" of {_amount(self.expected_bytes)}" if self.expected_bytes > self.bytes else ""
        return (
            f"rank {os.environ.get('RANK', '0')}: {_amount(self.bytes)}{whole} of weights from {self.url} in "
            f"{seconds:.1f} s, {_amount(self.bytes / seconds)}/s, {self.requests} requests"
        )

    def fill(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Read consecutive bytes of an object into the views, one view after the other.

        If the connection breaks, the next request continues where the bytes ended.

        Raises:
            ModelRefused: the object is shorter, has changed, or can't be read.
        """
        left = [view for view in views if len(view)]
        end = start + sum(map(len, left))
        if end > self.size(name):
            raise ModelRefused(
                f"{self.url_of(name)}: it has {self.size(name)} bytes, and its header or index speaks of "
                f"{end}; upload it again"
            )
        for attempt in range(_ATTEMPTS):
            if not left:
                return
            try:
                body = self._body(name, end - sum(map(len, left)), end)
                with contextlib.closing(body):
                    self._take(body, left)
            except _BrokenOff as error:
                if attempt == _ATTEMPTS - 1:
                    raise self._refused(name, error) from error
                time.sleep(_PAUSE_S * 2**attempt)

    def _body(self, name: str, start: int, end: int) -> Any:
        """Request bytes of an object; return the body of the response."""
        etag = self._version(name).etag
        answer = self._answer(self._client.get_object, name, Range=f"bytes={start}-{end - 1}", IfMatch=etag)
        with self._lock:
            self.requests += 1
        if answer["ETag"] != etag:  # from a store that ignores If-Match
            raise self._changed(name)
        if answer["ContentLength"] != end - start:
            raise ModelRefused(
                f"{self.url_of(name)}: {answer['ContentLength']} bytes were sent for bytes {start} to {end}; "
                "expected a store that knows ranges"
            )
        return answer["Body"]

    def _take(self, body: Any, left: list[memoryview]) -> None:
        """Read the body of a response into the buffers `left`, and drop the filled ones from the list."""
        while left:
            try:
                chunk = body.read(min(_STEP_BYTES, len(left[0])))
            except (OSError, self._errors.HTTPClientError, self._errors.IncompleteReadError) as error:
                raise _BrokenOff(str(error)) from error
            if self._stopped:
                raise _Stopped
            if not chunk:
                raise _BrokenOff(f"the answer ended {sum(map(len, left))} bytes early")
            left[0][: len(chunk)] = chunk
            left[0] = left[0][len(chunk) :]
            with self._lock:
                self.bytes += len(chunk)
            if not left[0]:
                del left[0]

    def _version(self, name: str) -> _Version:
        with self._lock:
            looking = self._looking.setdefault(name, threading.Lock())
        with looking:
            if name not in self._versions:
                answer = self._answer(self._client.head_object, name)
                self._versions[name] = _Version(answer["ContentLength"], answer["ETag"])
        return self._versions[name]

    def _answer(self, operation: Callable[..., Any], name: str, **options: str) -> Any:
        key = f"{self._key}/{name}" if name else self._key
        try:
            return operation(Bucket=self._bucket, Key=key, **options)
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            raise self._refused(name, error) from error

    def _changed(self, name: str) -> ModelRefused:
        return ModelRefused(
            f"{self.url_of(name)}: it has changed while it was read; write new weights under a new key, and "
            "name that in the archive"
        )

    def _refused(self, name: str, error: Exception) -> ModelRefused:
        """Return the refusal, with advice, for an error of botocore or of a response."""
        where = self.url_of(name)
        if isinstance(error, self._errors.ClientError):
            found = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            said = f"S3 answered {status} ({found.get('Code', '')}: {found.get('Message', '')})"
            if status == 412:
                return self._changed(name)
            if status == 404:
                return ObjectMissing(f"{where}: there is no such object; {said}; expected weights there")
            if status in (401, 403):
                return ObjectMissing(
                    f"{where}: the credentials of the server do not open it; {said}; give them s3:GetObject, "
                    "and s3:ListBucket, without which a missing object is answered in the same way"
                )
            return ModelRefused(f"{where}: {said}")
        kinds = (self._errors.NoCredentialsError, self._errors.PartialCredentialsError)
        if isinstance(error, (*kinds, self._errors.NoRegionError, ValueError)):
            return ModelRefused(
                f"{where}: {error}; set AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID and so on for the server, as "
                "for the aws command"
            )
        kind = "" if isinstance(error, _BrokenOff) else f"{type(error).__name__}: "
        return ModelRefused(
            f"{where}: it can't be read: {kind}{error}; expected that a worker reaches S3 "
            "(AWS_ENDPOINT_URL, a network policy)"
        )


def _requests(pieces: Sequence[Piece]) -> Iterator[tuple[str, int, list[memoryview]]]:
    """Yield ranges of at most `PART_BYTES`, each with the views to read it into."""
    name, start, end, views = "", 0, 0, list[memoryview]()
    for piece in pieces:
        at = piece.start
        for view in _cut(piece.into):
            if views and (name, end) == (piece.name, at) and end - start + len(view) <= PART_BYTES:
                views.append(view)
            else:
                if views:
                    yield name, start, views
                name, start, views = piece.name, at, [view]
            at = end = at + len(view)
    if views:
        yield name, start, views


def _cut(view: memoryview) -> Iterator[memoryview]:
    """Yield parts of a view, each of at most `PART_BYTES`; their sizes differ by one byte at most."""
    count = -(-len(view) // PART_BYTES)
    for part in range(count):
        yield view[len(view) * part // count : len(view) * (part + 1) // count]


def _amount(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
