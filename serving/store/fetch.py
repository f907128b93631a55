"""Downloads an archive from an allowed URL into the model store, atomically and within limits.

Proxies from environment variables are not used: connections go to the checked addresses only.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from torchere.serving.config.kinds import shown_url
from torchere.serving.errors import DownloadFailed, ModelNotFound, ServingError
from torchere.serving.store.scratch import lock, machine
from torchere.serving.store.url_rules import Source, allow, is_public

MAX_REDIRECTS = 5
SILENCE_TIMEOUT_S = 30.0  # limit of one network operation; the whole download has its own limit
CHUNK_BYTES = 1 << 18
GIVEN_UP = "it was given up before its end"
TOOK_LONGER = "it took longer than download_timeout_s"
PART_PREFIX = ".download-"  # hidden, because hidden files in the store are not archives

Resolve = Callable[[str, int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Download:
    """An archive in the model store that was downloaded from a URL."""

    path: Path
    is_new: bool  # this download created the file and may delete it; False: the file existed before


class Interrupt:
    """Cancels one running download; `stop` may be called from any thread."""

    def __init__(self) -> None:
        self.asked = False
        self._connection: _PinnedConnection | None = None

    def stop(self) -> None:
        """Abort the download; its caller gets `DownloadFailed`."""
        self.asked = True
        if self._connection is not None:
            self._connection.cut()

    def check(self, source: Source) -> None:
        """Raise `DownloadFailed` if `stop` was called; the message names the URL of `source`."""
        if self.asked:
            raise _failed(source, GIVEN_UP)

    def watch(self, connection: _PinnedConnection) -> None:
        """Set the connection that `stop` closes; close it immediately if `stop` was already called."""
        self._connection = connection
        if self.asked:
            connection.cut()


def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host from the system's resolver; raise OSError when there are none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Origins:
    """The URLs of the files that this server has downloaded, or reused from an earlier start. Thread-safe.

    A file is named, or deleted, and recorded under one lock: a concurrent download sees both or neither.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls: dict[Path, str] = {}  # without the query, which may be a new signature each time
        self._of_clients: set[Path] = set()  # downloaded at a client's request, not an operator's

    def name(self, part: str, target: Path, url: str, of_client: bool) -> None:
        """Give a finished download its name; raise FileExistsError if the name exists."""
        with self._lock:
            _give_name(part, target)
            self._urls[target] = shown_url(url)
            if of_client:
                self._of_clients.add(target)

    def reuse(self, target: Path, url: str) -> Download:
        """Use an existing file as that of a URL; raise `ServingError` if it is the file of another URL."""
        with self._lock:
            other = self._urls.setdefault(target, shown_url(url))
        if other != shown_url(url):
            raise _exists(target, f"{target.name} is the file from {other}; give one of the two another name")
        return Download(target, is_new=False)

    def delete(self, target: Path) -> None:
        """Delete the file, if it exists; the name is free for any URL."""
        with self._lock:
            target.unlink(missing_ok=True)
            self._urls.pop(target, None)
            self._of_clients.discard(target)

    def is_of_client(self, target: Path) -> bool:
        """Return whether this file was downloaded at a client's request, whichever name it is loaded by."""
        return target in self._of_clients


class Downloader:
    """Downloads archives for one server. Thread-safe.

    Args:
        patterns: `allowed_urls`.
        max_bytes: the maximum size of an archive.
        timeout_s: limit of one download in seconds, including redirects.
        resolver: resolves a host name to addresses.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        max_bytes: int,
        timeout_s: float,
        resolver: Resolve = resolve,
    ) -> None:
        self.origins = Origins()
        self.patterns = patterns
        self.timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._resolve = resolver

    def download(
        self,
        url: str,
        folder: Path,
        by_operator: bool = False,
        interrupt: Interrupt | None = None,
        *,
        signs: bool = False,
        reuses: bool = False,
        max_bytes: int | None = None,
    ) -> Download:
        """Download the file at a URL into the folder, under the file name in the URL. Blocks.

        Args:
            url: the URL of the archive.
            folder: the model store.
            by_operator: the operator names the URL, so `allowed_urls` need not match; implies `reuses`.
            interrupt: aborts the download from another thread.
            signs: the URL is an S3 URL, to be requested with the server's credentials.
            reuses: use an existing file unless it is that of another URL; replace an empty one.
            max_bytes: a smaller limit of the size, for a file that is not an archive.

        Raises:
            ModelNotFound: the URL is not allowed.
            DownloadFailed: the download failed; `detail` says why.
            ServingError: a file of that name exists, or the file can't be written. No error leaves a file in
                the folder.
        """
        patterns = self._patterns_for(url, by_operator)
        source = signed_url(allow(url, patterns)) if signs else allow(url, patterns)
        target, reuses = folder / source.file_name, reuses or by_operator
        interrupt = interrupt or Interrupt()
        interrupt.check(source)
        try:
            if target.exists():
                if not reuses:
                    raise _exists(target)
                if target.stat().st_size:
                    return self.origins.reuse(target, url)
                target.unlink(missing_ok=True)
            descriptor, part = tempfile.mkstemp(prefix=PART_PREFIX + machine(), dir=folder)
        except OSError as err:
            raise unsaved(url, f"{folder}: {err.strerror}") from err
        try:
            chunks = self._chunks(source, patterns, interrupt, max_bytes)
            with os.fdopen(descriptor, "wb") as file, closing(chunks):
                lock(file)  # marks the part as in use for `sweep_parts` of other servers
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())  # otherwise a power failure could truncate the file
            self.origins.name(part, target, url, of_client=not by_operator)
        except FileExistsError as err:
            if not reuses:
                raise _exists(target) from err
            return self.origins.reuse(target, url)  # another server that started at the same time was faster
        except OSError as err:
            raise unsaved(url, f"{target}: {err.strerror}") from err
        finally:
            Path(part).unlink(missing_ok=True)
        return Download(target, is_new=True)

    def _chunks(
        self, source: Source, patterns: Sequence[str], interrupt: Interrupt, max_bytes: int | None
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of a source; convert every I/O error to `DownloadFailed`."""
        received = 0
        limit = min(self._max_bytes, max_bytes or self._max_bytes)
        if source.scheme == "s3":
            source = signed(source)
        is_file = source.scheme == "file"
        fetched = _file_chunks(source) if is_file else self._http_chunks(source, patterns, interrupt)
        try:
            with closing(fetched):  # close the connection immediately, also on an error
                for chunk in fetched:
                    if interrupt.asked:
                        break
                    received += len(chunk)
                    if received > limit:
                        name = "max_download_bytes=" if limit == self._max_bytes else ""
                        raise _failed(source, f"it is larger than {name}{limit}")
                    yield chunk
        except (OSError, UnicodeError, http.client.HTTPException) as err:  # UnicodeError: invalid host name
            reason = GIVEN_UP if interrupt.asked else f"{type(err).__name__}: {err}"
            raise _failed(source, reason) from err
        interrupt.check(source)  # a closed connection looks like the end of a body without a length

    def _patterns_for(self, url: str, by_operator: bool) -> Sequence[str]:
        """Return the patterns of a download: an operator's own URL is allowed, and those it redirects to."""
        if not by_operator:
            return self.patterns
        try:
            parts = urlsplit(url)
        except ValueError:
            return self.patterns  # `allow` refuses such a URL, and says why
        same_server = re.escape(f"{parts.scheme}://{parts.netloc}/") + ".*"
        return (*self.patterns, re.escape(url), same_server, "https?://.*")

    def _http_chunks(
        self, source: Source, patterns: Sequence[str], interrupt: Interrupt
    ) -> Generator[bytes, None, None]:
        deadline_s = time.monotonic() + self.timeout_s
        asked = source
        for _ in range(MAX_REDIRECTS + 1):
            with self._answer(source, deadline_s, interrupt) as response:
                if 300 <= response.status < 400 and (location := response.getheader("Location")):
                    source = self._redirected(asked, source, location, patterns)
                    continue
                if response.status != 200:
                    raise _failed(asked, f"the server answered {response.status} {response.reason[:200]}")
                yield from _body(asked, response, deadline_s)
                return
        raise _failed(asked, f"more than {MAX_REDIRECTS} redirects")

    def _redirected(self, asked: Source, source: Source, location: str, patterns: Sequence[str]) -> Source:
        try:
            target = allow(urljoin(source.url, location), patterns)
        except (ModelNotFound, ValueError) as err:  # ValueError: not a URL
            shown = location.partition("?")[0][:200]  # without the query, which may contain a signature
            raise _failed(asked, f"it redirects to {shown!r}, which allowed_urls does not match") from err
        if target.scheme in ("file", "s3") or (source.scheme, target.scheme) == ("https", "http"):
            raise _failed(asked, f"it redirects from {source.scheme} to {target.scheme}")
        return target

    @contextmanager
    def _answer(
        self, source: Source, deadline_s: float, interrupt: Interrupt
    ) -> Iterator[http.client.HTTPResponse]:
        interrupt.check(source)  # before the DNS lookup, which can't be interrupted
        connection = _PinnedConnection(source, self._addresses(source))
        # A server that sends a byte from time to time never triggers the socket timeout, so the connection is
        # closed at the limit.
        cutter = threading.Timer(max(0.0, deadline_s - time.monotonic()), connection.cut)
        cutter.daemon = True
        cutter.start()
        try:
            interrupt.watch(connection)
            connection.request("GET", source.target, headers={"User-Agent": "torchere", "Accept": "*/*"})
            with connection.getresponse() as response:
                yield response
        except (OSError, http.client.HTTPException):  # a closed connection can raise any of these
            if time.monotonic() >= deadline_s:
                raise TimeoutError(TOOK_LONGER) from None
            raise
        finally:
            cutter.cancel()
            connection.close()

    def _addresses(self, source: Source) -> Sequence[str]:
        addresses = self._resolve(source.host, source.port)
        if not source.may_be_private and (private := [one for one in addresses if not is_public(one)]):
            raise _failed(
                source,
                f"{source.host} is {private[0]}, an address of this machine or its network; "
                "name the host itself in allowed_urls to allow that",
            )
        return addresses


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an IP address that was checked; the host name is not resolved again."""

    def __init__(self, source: Source, addresses: Sequence[str]) -> None:
        self.default_port = 443 if source.scheme == "https" else 80  # not sent in Host
        super().__init__(source.host, source.port, timeout=SILENCE_TIMEOUT_S)
        self._addresses = addresses
        self._tls = source.scheme == "https"
        self._is_cut = False
        self._line: socket.socket | None = None  # kept because http.client moves `sock` to the response

    def connect(self) -> None:
        """Connect to the first address that accepts; then the TLS handshake verifies the host name."""
        self._take(self._connected())
        if self._tls:
            self._take(ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host))

    def _connected(self) -> socket.socket:
        for address in self._addresses[:-1]:  # the machine may have no route to some, such as those of IPv6
            with suppress(OSError):
                return socket.create_connection((address, self.port), SILENCE_TIMEOUT_S)
            if self._is_cut:
                raise TimeoutError(TOOK_LONGER)
        return socket.create_connection((self._addresses[-1], self.port), SILENCE_TIMEOUT_S)

    def _take(self, sock: socket.socket) -> None:
        self.sock = self._line = sock
        if self._is_cut:
            raise TimeoutError(TOOK_LONGER)

    def cut(self) -> None:
        """Shut down the connection, also while another thread reads from it."""
        self._is_cut = True
        if self._line is not None:
            with suppress(OSError):  # already closed
                # SSLSocket.shutdown can't be used: it removes the TLS object while the other thread reads
                # from it.
                socket.socket.shutdown(self._line, socket.SHUT_RDWR)


def _body(asked: Source, response: http.client.HTTPResponse, deadline_s: float) -> Iterator[bytes]:
    expected = response.length  # None: chunked, or ended by closing the connection
    received = 0
    while chunk := response.read1(CHUNK_BYTES):
        received += len(chunk)
        yield chunk
    if time.monotonic() >= deadline_s:
        raise _failed(asked, TOOK_LONGER)
    if expected is not None and received != expected:
        raise _failed(asked, f"the connection ended after {received} of {expected} bytes")


def _file_chunks(source: Source) -> Generator[bytes, None, None]:
    descriptor = os.open(source.target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # pipes must not block
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # before `fdopen`, which can't open a folder
        os.close(descriptor)
        raise _failed(source, f"{source.target} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _give_name(part: str, target: Path) -> None:
    """Atomically rename a finished download; raise FileExistsError if the name exists."""
    os.chmod(part, 0o644)
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:  # without hard links: reserve the name with an empty file, then replace it
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.replace(part, target)


def _failed(source: Source, reason: str) -> DownloadFailed:
    # A redirect may have led to this URL, and the client must not see its signature.
    return DownloadFailed(f"Failed to download archive from: {shown_url(source.url)}", reason)


def unsaved(url: str, reason: str) -> ServingError:
    """Return the error for an archive that could not be written; the URL is shown without its query."""
    return ServingError(f"Failed to save model: {shown_url(url)}", reason)


def _exists(
    target: Path,
    text: str = "delete it from the model store, or register it by its name instead of the URL",
) -> ServingError:
    return ServingError(f"Model file already exists {target.name}", text)


# Archives in S3: an `s3://bucket/key` URL is converted to a signed HTTPS request.
# The AWS account controls access: credentials, region and endpoint are read from the same places as by AWS's
# own tools (environment, shared files, web identity of a Kubernetes service account, role of the machine).
# Needs `botocore`, which the extra `s3` installs. It only signs: the download uses the code above, with its
# limits.

SIGNATURE_LIFETIME_S = 900  # the request must start within this time


def signed(source: Source) -> Source:
    """Return the presigned HTTP(S) source of an `s3` source. Blocks: getting credentials may use the network.

    The field `url` is unchanged, so that no message or log line contains a signature. The endpoint may be a
    private host, because only the operator can set it.

    Raises:
        DownloadFailed: botocore is not installed, or gets no credentials or region.
    """
    parameters = {"Bucket": source.host, "Key": source.target}
    with _signing(source, "it") as session:
        from botocore.config import Config  # noqa: PLC0415 - an extra, and slow to import

        client = session.create_client("s3", config=Config(signature_version="s3v4"))
        client.meta.events.register_first("before-endpoint-resolution.s3", _at_its_region)
        url = client.generate_presigned_url("get_object", parameters, ExpiresIn=SIGNATURE_LIFETIME_S)
    parts = urlsplit(url)
    return replace(
        source,
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=parts.port or (443 if parts.scheme == "https" else 80),
        target=f"{parts.path}?{parts.query}",
        may_be_private=True,
    )


def _at_its_region(context: dict[str, Any], **_: object) -> None:
    """Let botocore sign for the region's host: the default host can't serve buckets of newer regions."""
    context["use_global_endpoint"] = False


@contextmanager
def _signing(source: Source, user: str) -> Iterator[Any]:
    """Yield a botocore session; convert its errors, and those of the services that give credentials."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - as in `signed`

        from torchere.archiver.models.load.s3 import session  # noqa: PLC0415 - only for URLs of S3

        yield session()
    except ImportError as err:
        raise _failed(source, f"{user} needs botocore: pip install 'torchere[s3]'") from err
    except (BotoCoreError, ClientError, ValueError, OSError) as err:  # OSError: no file of a web identity
        raise _failed(source, f"{err}; set AWS_REGION and credentials as for the aws command") from err


def signed_url(source: Source) -> Source:
    """Presign an HTTP(S) source in S3, which objects under SSE-KMS need; return other sources unchanged.

    As for `s3://`, `allowed_urls` must spell out the host, because the server's credentials give access.

    Raises:
        DownloadFailed: as for `signed`, or the host is not spelt out.
    """
    if source.scheme not in ("http", "https"):
        return source
    if not source.may_be_private:
        raise _failed(source, f"s3_sse_kms: no pattern of allowed_urls spells out the host {source.host}")
    with _signing(source, "s3_sse_kms") as session:
        from botocore.auth import S3SigV4QueryAuth  # noqa: PLC0415 - as in `signed`
        from botocore.awsrequest import AWSRequest  # noqa: PLC0415

        credentials, region = session.get_credentials(), session.get_config_variable("region")
        if credentials is None or region is None:
            missing = "credentials" if credentials is None else "region"
            raise _failed(
                source, f"s3_sse_kms: no {missing}; set AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID and so on"
            )
        request = AWSRequest("GET", source.url)
        S3SigV4QueryAuth(credentials, "s3", region, SIGNATURE_LIFETIME_S).add_auth(request)
    parts = urlsplit(request.url)
    return replace(source, target=f"{parts.path}?{parts.query}")
