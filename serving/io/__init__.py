"""Sockets and their timeouts, independent of any protocol."""
