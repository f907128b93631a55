"""Location of weights that several versions share: a file beside the folder of the archive.

Processes that map the same file share its pages; those that map equal copies do not. So the server gives
versions with the same weights one file. If a handler could write to that file, it is not in the handler's
folder, which then has a file of its own.
"""

from __future__ import annotations

import os

WORTH_MAPPING_BYTES = 1 << 20  # a smaller file is copied in less than a millisecond


def shared_file(path: str) -> str:
    """Return the path of the server's link to the file that holds the weights `path` for several versions."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(f"{folder}.shared", name)


def file_to_map(path: str) -> str:
    """Return the file to map for the weights `path`: the one that versions share, or `path` itself.

    A handler may replace its own weights before it loads them. Then their size or modification time differs,
    and `path` is used. Thread-safe.
    """
    shared = shared_file(path)
    try:
        one, own = os.stat(shared), os.stat(path)
    except OSError:  # there is none: the usual case
        return path
    alike = (one.st_size, one.st_mtime_ns) == (own.st_size, own.st_mtime_ns)
    return shared if alike else path
