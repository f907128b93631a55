"""Services shared by all listeners: settings, metrics, keys, limits, certificates."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil

from torchere.handlers.cgroup import sample_cgroup
from torchere.serving.access.client_limits import ClientLimits
from torchere.serving.access.keys import Keys
from torchere.serving.access.tls import Certificates
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.frontend.budgets import MESSAGE_OVERHEAD_BYTES, Budgets
from torchere.serving.telemetry.metrics import Metrics

MEMORY_SHARE = 4  # unfinished requests may hold at most 1/MEMORY_SHARE of the memory


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a frontend uses that is neither data plane nor control plane."""

    settings: ServerSettings
    metrics: Metrics
    keys: Keys | None = None  # None: token authorisation is off
    server_version: str = "0"
    budgets: Budgets = field(default_factory=Budgets)
    certificates: Certificates | None = None  # of every listener with TLS
    client_limits: ClientLimits | None = None  # None: no client has limits


def budgets_of(limits: Limits) -> Budgets:
    """Return the configured budgets, or ones derived from the memory of the container or the machine."""
    limit_bytes = limits.max_held_bytes
    if not limit_bytes:
        memory_bytes = int(psutil.virtual_memory().total)
        memory_bytes = min(memory_bytes, sample_cgroup().memory_limit_bytes or memory_bytes)
        limit_bytes = memory_bytes // MEMORY_SHARE
    return Budgets(limit_bytes, limits.max_request_bytes + MESSAGE_OVERHEAD_BYTES)
