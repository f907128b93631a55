"""Log lines, and where they are written.

access log: one line per answered request (`access_lines.py`).
outlet: an output stream with a queue of text and a thread that writes it (`output.py`).
mark: the start of a log record in a worker's output, with a secret token (`worker_lines.py`).
"""
