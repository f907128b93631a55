"""The access log: one line a request, for both protocols, in TorchServe's form."""

from __future__ import annotations

import logging

from torchere.serving.telemetry.access_lines import AccessLog
from torchere.serving.telemetry.logging import ACCESS_LOGGER

access_log = AccessLog(logging.getLogger(ACCESS_LOGGER))
