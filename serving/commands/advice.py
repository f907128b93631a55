"""Advice that `torchere predict` and `torchere bench` add to an error.

The server's texts are TorchServe's, which its clients compare; these lines are for people.
"""

from __future__ import annotations

import difflib
import http.client
import json
import re
import urllib.error
import urllib.request
from urllib.parse import quote

from torchere.client.key_file import FoundKey, is_loopback

_WAIT_S = 5.0
_MOST_BYTES = 1 << 20
_MOST_NAMES = 20
_NOT_FOUND = "Model not found"
# OpenSSL has the same code for a wrong host name or an expired certificate, where another CA does not help.
_NO_AUTHORITY = re.compile(r"CERTIFICATE_VERIFY_FAILED.*(issuer|self.signed)")
# The texts of bench, httpx and grpcio for a connection that is closed before an answer.
_CLOSED = re.compile(
    "^the server closed the connection$|^(no|the) connection to .*(Server disconnected without|Socket closed)"
)
_NO_WORKER = "has no worker to serve inference request"


def advice(message: str, address: str | None, model: str, found: FoundKey | None) -> str:
    """Return a line of advice on an error; "" if there is nothing to add.

    Args:
        message: the text of the answer, or the reason why there is none.
        address: the URL of the inference API over REST; None: it is not known.
        model: the requested model, as `name` or `name/version`.
        found: the key that was sent.
    """
    if about_tls := _about_tls(message, address):
        return about_tls
    if address is None:
        return ""
    if message.startswith(_NOT_FOUND):
        names = _get(address, "/v1/models", found).get("models")
        if not isinstance(names, list):
            return ""
        return _models(model.partition("/")[0], sorted(map(str, names)))
    if _NO_WORKER in message:
        reasons = _get(address, f"/readyz/{quote(model)}", None).get("reasons")
        if isinstance(reasons, list) and any("failed" in str(reason) for reason in reasons):
            name = model.partition("/")[0]
            return f"{model} failed: the server's log and its describe say why (GET /models/{name})"
    return ""


def _about_tls(message: str, address: str | None) -> str:
    if _NO_AUTHORITY.search(message):
        return "for a certificate of your own authority, set SSL_CERT_FILE to the file of the authority's"
    if _CLOSED.search(message) and "https://" not in f"{message} {address}":
        return "the port may expect TLS: try it with an --address that begins with https://"
    return ""


def _models(wanted: str, names: list[str]) -> str:
    if not names:
        return "the server has no models"
    shown = ", ".join(ascii(name)[1:-1] for name in names[:_MOST_NAMES])
    others = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    near = difflib.get_close_matches(wanted, names, n=1)
    meant = f"; did you mean {ascii(near[0])[1:-1]}?" if near else ""
    return f"the server has {shown}{others}{meant}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect the answer: urllib would follow it, and send the key to any other server."""

    def redirect_request(self, *_arguments: object) -> None:
        """Return no request."""


def _get(address: str, path: str, found: FoundKey | None) -> dict[str, object]:
    """Return the JSON object that the server answers at a path, a refusal included; {} for other answers."""
    headers = {"Authorization": f"Bearer {found.key}"} if found else {}
    # The environment's proxy must not get the key, and would take such an address for its own machine.
    direct = [urllib.request.ProxyHandler({})] if is_loopback(address) else []
    try:
        request = urllib.request.Request(address.rstrip("/") + path, headers=headers)
        try:
            answer = urllib.request.build_opener(_NoRedirects, *direct).open(request, timeout=_WAIT_S)
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            value = json.loads(answer.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return {}
    return value if isinstance(value, dict) else {}
