"""Guard against browsers that call the server for a foreign web site, where a token is not needed. Pure.

A page of another site may post a form to any address that its visitor's browser reaches (cross-site request
forgery); the browser sends the page's site as `Origin`. A page whose name is made to resolve to the server's
address (DNS rebinding) may use every method and read the responses; the browser sends the name as `Host`.
If TLS asks for a certificate, a browser also sends its user's for the requests of every page.
"""

from __future__ import annotations

import ipaddress

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import Forbidden
from torchere.serving.frontend.authorisation import API_KEY, Need, Surfaces

ANY = "*"


class BrowserGuard:
    """The hosts and origins that one listener accepts where it asks for no token.

    Requests to management and to the metrics are always checked, others only if `allowed_hosts` is set,
    because a proxy of the inference port may keep the public name in `Host`, and predictions change nothing.
    """

    def __init__(self, surfaces: Surfaces, settings: ServerSettings) -> None:
        address = settings.inference_address
        if "management" in surfaces:
            address = settings.management_address
        elif "metrics" in surfaces and settings.metrics_address is not None:
            address = settings.metrics_address
        self._bound = address.host.lower()
        self._is_unix = address.unix_path is not None  # browsers can't reach Unix sockets
        self._names = frozenset(settings.allowed_hosts)
        # On an address that is not local, the names of a cluster's services have to work without a setting.
        self._needs_known_host = (address.is_local and not self._is_unix) or bool(self._names)
        origins = {origin.strip().lower() for origin in settings.cors_allowed_origin.split(",")}
        # "*" lets every site read predictions, which does not mean that every site may change models.
        self._origins = frozenset(origins - {ANY, "", "null"})
        # Includes the API key, because a server without authorisation does not check it, either.
        self._always: frozenset[Need] = frozenset({"management", "metrics", API_KEY})

    def refusal(
        self, needs: Need, host: bytes, origin: bytes | None, *, checks_host: bool = True
    ) -> Forbidden | None:
        """Return the error of a request that a browser may have sent for a foreign site; else None.

        Args:
            needs: the need of its route in the table of authorisation.
            host: the valid value of `Host`; empty without that header.
            origin: the value of `Origin`. Browsers send it with every request that changes something; None
                means another client, or a rebound page that reads.
            checks_host: False for a client that is known only by its certificate: a browser sends nothing if
                the server's certificate has another name.
        """
        if needs not in self._always and not self._names:
            return None
        authority = host.decode("ascii").lower()
        if origin is not None:
            site = origin.decode("latin-1").lower()
            if site not in self._origins and not self._is_own(site, authority):
                return _foreign_site(site or "null")
        name = _name_of(authority)
        if not checks_host or self._is_known(name) or (origin is None and not self._needs_known_host):
            return None
        return _foreign_host(name)

    def _is_own(self, site: str, authority: str) -> bool:
        """Tell whether an origin is the host of the request, or one that the operator has named."""
        scheme, _, its_authority = site.partition("://")
        if not its_authority:  # "null", of a page without an origin
            return False
        default_port = ":443" if scheme == "https" else ":80"
        return its_authority == authority.removesuffix(default_port) or _name_of(its_authority) in self._names

    def _is_known(self, name: str) -> bool:
        """Tell whether a host can't be the rebound name of a foreign site.

        Addresses are not names, and the public DNS has no names without a dot or below `localhost`.
        """
        return (
            "." not in name
            or name.endswith(".localhost")
            or self._is_unix
            or name == self._bound
            or not self._names.isdisjoint((name, ANY))
            or _address(name) is not None
        )


def _foreign_site(site: str) -> Forbidden:
    return Forbidden(
        f"Requests of web pages of {site[:100]!a} are not allowed. Name the origin in cors_allowed_origin or "
        "its host in allowed_hosts, or switch token authorization on and send a key."
    )


def _foreign_host(name: str) -> Forbidden:
    return Forbidden(
        f"Requests for the host {name[:100]!a} are not allowed. Call the server by its address or as "
        "localhost, name the host in allowed_hosts, or switch token authorization on."
    )


def _name_of(authority: str) -> str:
    """Return the host of an authority: without port, brackets and the final dot."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
