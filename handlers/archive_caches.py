"""What Python keeps of folders that it imported from, long after the folder of an archive is gone."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import MutableMapping
from typing import Any


def forget_folder(folder: str) -> None:
    """Drop the listings of a folder and all below it, and the source that tracebacks have shown of it.

    From any thread. Not importlib.invalidate_caches(), which walks a dictionary that imports in other threads
    change under it, and then raises.
    """
    caches: tuple[MutableMapping[Any, Any], ...] = (sys.path_importer_cache, linecache.cache)
    for cache in caches:
        for place in tuple(cache):
            # The prompt of Python 3.13.0 keeps what is typed in under its code object.
            if isinstance(place, str) and (place == folder or place.startswith(folder + os.sep)):
                cache.pop(place, None)
