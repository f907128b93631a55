from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.resolve import load_entry_point
from torchere.handlers.ts_compat.legacy import import_class


def test_a_class_is_found_with_and_without_a_prefix() -> None:
    assert import_class("collections.OrderedDict") is OrderedDict
    assert import_class("OrderedDict", "collections") is OrderedDict
    assert import_class("handlers.RotatingFileHandler", "logging").__name__ == "RotatingFileHandler"


@pytest.mark.parametrize("name", ["OrderedDict", "collections.Nothing", "no_such_module.Thing"])
def test_what_is_not_there_is_an_import_error(name: str) -> None:
    with pytest.raises(ImportError):
        import_class(name)


def test_the_archives_own_classes_are_found(write_archive: Callable[..., Path], make_context: Any) -> None:
    code = """
        from ts.handler_utils.utils import import_class
        def handle(data, context):
            return data and [import_class("net.Net").__module__]
    """
    context = make_context(write_archive({"my.py": code, "net.py": "class Net: pass"}))
    answers: Any = load_entry_point("my.py", context)([{}], context)
    (module,) = answers
    assert module.startswith("_torchere_archive.m.")
    assert module.endswith(".net")
