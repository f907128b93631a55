"""Import a class by its dotted name, from the archive first."""

from __future__ import annotations

import sys
from typing import Any


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """Return the class `class_name`, optionally prefixed by its module, below package `module_prefix`.

    Called from the code of an archive, it finds the archive's own modules too.

    Raises:
        ImportError: there is no such module, or no such class in it.
    """
    module_name, _, name = class_name.rpartition(".")
    full_name = ".".join(part for part in (module_prefix, module_name) if part)
    if not full_name:
        raise ImportError(f"{class_name!r} names no module: write 'package.module.{class_name}'")
    importer = sys._getframe(1).f_builtins["__import__"]  # the caller's, which searches the caller's archive
    module = importer(full_name, {}, {}, [name], 0)
    found = getattr(module, name, None)
    if found is None:
        raise ImportError(f"class:{name} not found in module:{full_name}.")
    return found
