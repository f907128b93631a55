"""The access log: one line per request, for both protocols, in TorchServe's format."""

from __future__ import annotations

import logging

from torchere.serving.logs.access_lines import AccessLog
from torchere.serving.logs.lines import ACCESS_LOGGER

access_log = AccessLog(logging.getLogger(ACCESS_LOGGER))
