"""The page at `/` of the inference port, for browsers: models, their inputs, a form to try them, the API.

It is one static file, whose script calls the routes of the port, with a key that the user types in if tokens
are on. So the page itself reveals nothing about the server, and needs no key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.authorisation import Surfaces

_FILE = Path(__file__).with_name("page.html")
_PLACE = 'data-metrics="METRICS"'


def wants_page(method: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether a request for `/` comes from a browser: a GET or HEAD whose `Accept` names HTML."""
    if method not in (b"GET", b"HEAD"):
        return False
    accepted = b",".join(value for name, value in headers if name.lower() == b"accept")
    return any(one.partition(b";")[0].strip().lower() == b"text/html" for one in accepted.split(b","))


def page(surfaces: Surfaces, settings: ServerSettings) -> tuple[str, dict[str, str]]:
    """Return the page, and the headers of its answer."""
    text = _FILE.read_text(encoding="utf-8")
    script, style = _digest("script", text), _digest("style", text)
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "content-type": "text/html; charset=utf-8",
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "vary": "accept",
        "x-content-type-options": "nosniff",
    }
    return text.replace(_PLACE, f'data-metrics="{_metrics(surfaces, settings.metrics_address)}"'), headers


def _metrics(surfaces: Surfaces, address: Address | None) -> str:
    """Return where the metrics are: a path of this port, or `scheme:port` of this host; "" without a link."""
    if "metrics" in surfaces:
        return "/metrics"
    if address is None or address.unix_path is not None or not address.port:
        return ""
    return f"{'https' if address.tls else 'http'}:{address.port}"


def _digest(element: str, text: str) -> str:
    """Return the hash with which a content security policy allows this inline element, and no other."""
    found = re.search(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    content = found[1] if found else ""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
