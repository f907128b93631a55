"""Takes the launcher's place as `__main__` in a worker: defines no names there, and is quick to import.

Processes that a handler spawns import this file as `__mp_main__`, where it makes `import ts` resolve. For a
script outside of workers, which it runs as `python main.py SCRIPT ARGUMENTS`, it does so, too.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from types import ModuleType

from torchere.handlers.ts_compat import alias

_launchers: list[ModuleType] = []  # keeps the globals of the code that runs as `__main__`


def hide_launcher() -> None:
    """Replace `__main__` and the command line of this process, in which the code of models runs.

    Model code reads both to find out how it was started. It also unpickles classes of training scripts from
    `__main__`, where the names of a launcher must not hide theirs.
    """
    spec = importlib.util.find_spec(__name__)
    assert spec is not None  # it is this module's
    main = ModuleType("__main__")
    vars(main).update(__spec__=spec, __file__=spec.origin, __builtins__=builtins, __cached__=None)
    _launchers.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv[:] = [""]
    sys.orig_argv[:] = [sys.executable]


def _run_script() -> None:
    """Run the script that the command line names, as Python itself would."""
    import runpy  # noqa: PLC0415  # not in workers

    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11: search no script folder
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    if importlib.util.find_spec("ts") is None:  # an installed TorchServe, or `torchere-ts`, takes precedence
        alias.install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__mp_main__":
    alias.install()
elif __name__ == "__main__" and sys.argv[1:]:
    _run_script()
