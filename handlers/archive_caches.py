"""Python's caches of imported folders, which outlive the folder of an unloaded archive."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import MutableMapping
from typing import Any


def forget_folder(folder: str) -> None:
    """Drop the cached listings of a folder and its subfolders, and their source lines for tracebacks.

    May be called from any thread. importlib.invalidate_caches() is not used: it iterates over a dictionary
    that imports in other threads change meanwhile, and then raises.
    """
    caches: tuple[MutableMapping[Any, Any], ...] = (sys.path_importer_cache, linecache.cache)
    for cache in caches:
        for place in tuple(cache):
            # The interactive prompt of Python 3.13.0 stores its input under a code object, not a path.
            if isinstance(place, str) and (place == folder or place.startswith(folder + os.sep)):
                cache.pop(place, None)
