"""Rules for archive URLs: the operator's patterns (`allowed_urls`) and the accepted URL syntax.

`allowed_urls` is empty by default, so that the model store is the only source. A pattern must match the whole
URL, ignoring case, as in TorchServe. End the host in a pattern with a slash or a port:
`https://models.example.com.*` also matches `https://models.example.com.evil.org/x.mar`.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from torchere.serving.config.kinds import shown_url
from torchere.serving.errors import DownloadFailed, ModelNotFound

logger = logging.getLogger(__name__)

MAX_URL_CHARACTERS = 2048
MAX_PATTERN_CHARACTERS = 1024
# A crafted URL can make a pattern backtrack endlessly, and Python's `re` can't be interrupted. So matching
# runs in its own process, which usually takes 50 ms.
MATCH_TIMEOUT_S = 5.0

_REMOTE = re.compile(r"(https?|file|s3)://", re.IGNORECASE)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]{0,254}")
# Older Pythons parse "[::1].example.com" as the host ::1, although a pattern for *.example.com matches it.
_IPV6_HOST = re.compile(r"\[[0-9a-f.]*:[0-9a-f:.]*\](:[0-9]*)?", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443, "file": 0, "s3": 0}
_MATCHER = """\
import json, re, sys
url, *patterns = json.load(sys.stdin)
print(json.dumps([bool(re.fullmatch(pattern, url, re.IGNORECASE)) for pattern in patterns]))
"""
_V4_INSIDE = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96")))
_TUNNELS = tuple(map(ipaddress.IPv6Network, ("2002::/16", "2001::/32", "64:ff9b:1::/48")))
# IETF protocol assignments; cloud metadata is at 192.0.0.192. Most of these addresses count as `is_global`
# before Python 3.11.10, 3.12.4 and 3.13.
_PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")


@dataclass(frozen=True, slots=True)
class Source:
    """A URL that may be fetched."""

    url: str
    scheme: str  # "http" | "https" | "file" | "s3"
    host: str  # without brackets; "" for a file; the bucket of S3
    port: int
    target: str  # path and query as sent; for a file its decoded path, for S3 the decoded key
    file_name: str  # last component of the path
    may_be_private: (
        bool  # the pattern names exactly this host (or bucket), so it may be in the operator's network
    )


def is_remote(url: str) -> bool:
    """Return whether `url` must be downloaded, rather than being a name in the model store."""
    return _REMOTE.match(url) is not None


def allow(url: str, patterns: Sequence[str]) -> Source:
    """Return the source of an allowed URL. Blocks on pattern matching, at most `MATCH_TIMEOUT_S`.

    Raises:
        ModelNotFound: no pattern matches the URL, or its syntax could mislead a pattern. The message is
            TorchServe's; `detail` has the reason.
        DownloadFailed: a pattern matches the URL, but its port is not a number.
    """
    if any(".." in text for text in _decodings(url)):
        raise ModelNotFound(f"Relative path is not allowed in url: {shown_url(url)}")
    if not is_remote(url):
        raise _refused(url, "it is neither http, https, s3 nor file")
    has_nul = any("\0" in text for text in _decodings(url))  # no file's name has one
    if problem := "it encodes a NUL character" if has_nul else _deceptive(url):
        if _names_no_port(url) and _matching(url, patterns):
            raise DownloadFailed(f"Failed to download archive from: {shown_url(url)}", problem)
        raise _refused(url, problem)
    matching = _matching(url, patterns)
    if not matching:
        raise _refused(
            url, "allowed_urls is empty" if not patterns else "no pattern of allowed_urls matches it"
        )
    source = _source(url, matching)
    if not _FILE_NAME.fullmatch(source.file_name):
        raise _refused(url, f"its path ends in {source.file_name[:80]!r}, expected the name of an archive")
    if source.scheme == "s3" and not source.may_be_private:
        # The server's credentials give access to the bucket, so a broad pattern like ".*" is not enough.
        raise _refused(url, f"no pattern of allowed_urls spells out the bucket {source.host}")
    return source


def is_public(address: str) -> bool:
    """Return whether an IP address is on the Internet, not on this machine or its network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # Site-local addresses are deprecated, but for Python they are `is_global`.
        if ip.is_site_local or any(ip in network for network in _TUNNELS):
            return False
        if any(ip in network for network in _V4_INSIDE):
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and ip not in _PROTOCOLS and not ip.is_multicast and not ip.is_reserved


def names_host(pattern: str, host: str) -> bool:
    r"""Return whether a pattern spells out this host literally, in the host part of a URL.

    >>> names_host(r"https?://models\.internal(:8080)?/.*", "models.internal")
    True
    >>> names_host(r"https?://.*\.internal/.*", "models.internal")
    False
    >>> names_host(r"https?://.*/models/.*", "models")
    False
    """
    plain = re.sub(r"\\([.\-:/\[\]])", r"\1", pattern)
    around = rf"(?<![\w.\-*+]){re.escape(host.rstrip('.'))}(?![\w.\-*+?])"
    hosts = re.findall(r"://([^/]*)", plain)
    return bool(host) and any(re.search(around, each, re.IGNORECASE) for each in hosts)


def _names_no_port(url: str) -> bool:
    """Return whether a word stands where the port of a URL should be."""
    return re.fullmatch(r"https?://[\w.-]+:[a-z][\w-]*(/.*)?", url, re.ASCII | re.IGNORECASE) is not None


def _deceptive(url: str) -> str:
    """Return the reason why the syntax of a URL could mislead a pattern; "" if it can't."""
    if len(url) > MAX_URL_CHARACTERS:
        return f"it has {len(url)} characters, at most {MAX_URL_CHARACTERS} are read"
    if not url.isascii() or not url.isprintable() or set(url) & set(" \\#<>\"'`{}|^"):
        return "it holds a character that has to be percent-encoded, or a fragment"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as err:
        return str(err)
    if "@" in parts.netloc or "%" in parts.netloc:
        return "it names a user, or encodes its host; name the host alone"
    if parts.scheme == "file":
        return "" if parts.netloc in ("", "localhost") else "a file URL names no host: file:///path"
    return _deceptive_host(parts, port)


def _deceptive_host(parts: SplitResult, port: int | None) -> str:
    if set(parts.netloc) & set("[]") and not _IPV6_HOST.fullmatch(parts.netloc):
        return "brackets in its host are for an IPv6 address, and nothing stands beside them but a port"
    if parts.scheme == "s3" and (port is not None or parts.query):
        return "of S3 it names a bucket and a key, nothing else: s3://bucket/key"
    return "" if parts.hostname and port != 0 else "it names no host"


def _decodings(url: str) -> list[str]:
    """Return the URL, and the URL percent-decoded once and twice, as chained servers might decode it."""
    once = unquote(url)
    return [url, once, unquote(once)]


def _matching(url: str, patterns: Sequence[str]) -> list[str]:
    usable = [pattern for pattern in patterns if len(pattern) <= MAX_PATTERN_CHARACTERS]
    if not usable:
        return []
    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    told = json.dumps([url, *usable]).encode()  # all users can see arguments; a URL may be signed
    try:
        found = subprocess.run(command, input=told, capture_output=True, timeout=MATCH_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError) as err:
        logger.warning("allowed_urls could not be matched, so the URL is refused: %s", type(err).__name__)
        return []
    return [pattern for pattern, matches in zip(usable, json.loads(found.stdout), strict=True) if matches]


def _source(url: str, matching: Sequence[str]) -> Source:
    parts = urlsplit(url)
    is_file = parts.scheme == "file"
    host = "" if is_file else parts.hostname or ""
    query = f"?{parts.query}" if parts.query else ""
    decoded = {"file": unquote(parts.path), "s3": unquote(parts.path).lstrip("/")}
    return Source(
        url=url,
        scheme=parts.scheme,
        host=host,
        port=parts.port or _DEFAULT_PORTS[parts.scheme],
        target=decoded.get(parts.scheme, parts.path + query),
        file_name=parts.path.rpartition("/")[2],
        may_be_private=any(names_host(pattern, host) for pattern in matching),
    )


def _refused(url: str, reason: str) -> ModelNotFound:
    shown = shown_url(url)[:MAX_URL_CHARACTERS]
    return ModelNotFound(f"Given URL {shown} does not match any allowed URL(s)", reason)
