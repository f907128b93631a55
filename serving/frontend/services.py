"""What every listener shares beside the two planes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchere.serving.frontend.keys import Keys
from torchere.serving.frontend.tls import Certificates
from torchere.serving.settings import ServerSettings
from torchere.serving.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class CorsHeaders:
    """Values of the three `Access-Control-Allow-*` headers; "" leaves one out."""

    origin: str = ""
    methods: str = ""
    headers: str = ""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a frontend uses that is neither data plane nor control plane."""

    settings: ServerSettings
    metrics: Metrics
    keys: Keys | None = None  # None: token authorisation is off
    server_version: str = "0"
    cors: CorsHeaders = field(default_factory=CorsHeaders)
    certificates: Certificates | None = None  # of every listener with TLS
