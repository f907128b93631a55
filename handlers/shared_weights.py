"""Where weights lie that several versions share: a file beside the folder of the archive.

Pages of a mapped file are shared by those who map this file, not by those who map its equals. So the server
gives versions with the same weights one file; where a handler could write to it, it is not in the folder that
the handler knows, where it finds a file of its own as ever.
"""

from __future__ import annotations

import os

WORTH_MAPPING_BYTES = 1 << 20  # a smaller file is copied in less than a millisecond


def shared_file(path: str) -> str:
    """Where the server puts the link to what the weights file `path` has in common with other versions."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(f"{folder}.shared", name)


def file_to_map(path: str) -> str:
    """The file whose pages may be the weights of `path`: the one that versions share, or `path` itself.

    A handler may put other weights in the place of its own before it loads them. Their size or time of change
    is another then, and they count. Thread-safe.
    """
    shared = shared_file(path)
    try:
        one, own = os.stat(shared), os.stat(path)
    except OSError:  # there is none: the usual case
        return path
    alike = (one.st_size, one.st_mtime_ns) == (own.st_size, own.st_mtime_ns)
    return shared if alike else path
