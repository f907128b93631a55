"""Bytes and sockets, apart from any protocol."""
