"""Runs batches: executors in threads or processes behind one protocol, and the host around a handler."""
