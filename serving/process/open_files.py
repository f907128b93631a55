"""The limit on open files of the server process and of the processes that it starts."""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit, as Java does; the usual default is 1,024.

    Each connection needs one file descriptor; a connection above the limit is closed without an error. Call
    it before the fork server starts, for workers inherit the limit.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # where "unlimited" exceeds the system's maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
