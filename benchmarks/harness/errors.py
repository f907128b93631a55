"""Why something was not measured."""

from __future__ import annotations


class Unavailable(Exception):
    """A peer, tool or model that this machine can't have; the text says why. The rest goes on without it."""


class Failed(Exception):
    """A server did not start, or answered wrongly; the text has its last words."""
