"""Reads which inputs the tokenizer of a Hugging Face folder makes; loads no tokenizer."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPTIONAL = frozenset({"attention_mask", "token_type_ids"})
"""Inputs that a model fills by itself where its tokenizer does not make them."""
_CONFIG = "tokenizer_config.json"
_MEMBER = "model_input_names"


def tokenizer_inputs(path: Path) -> frozenset[str] | None:
    """Return the inputs that the tokenizer of the folder makes; None where the folder does not tell.

    They are those in its configuration, or else those of its class. Classes count for configurations of
    transformers 5 only, which name a `backend`: the defaults of some classes had token types before, and the
    clients of an older folder may send them.
    """
    config = _config(path / _CONFIG)
    names = config.get(_MEMBER)
    if names is None and "backend" in config:
        transformers: Any = importlib.import_module("transformers")
        names = getattr(getattr(transformers, str(config.get("tokenizer_class")), None), _MEMBER, None)
    return frozenset(map(str, names)) if isinstance(names, list) and names else None


def _config(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
