"""The section `torchscript` in a model-config.yaml of the user's: read, and added.

The archiver knows no YAML: it finds the section where it begins a line, as it mostly does, and its members
where each has a line of its own or all stand in braces.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchere.archiver.errors import ModelRefused
from torchere.archiver.torchscript_options import TorchScriptOptions

_NAME = re.compile(r"""["']?torchscript["']?:""")
_AUTOCAST = re.compile(r"""^["']?autocast["']?:""", re.MULTILINE)  # with which nothing is optimised
_COMMENT = re.compile(r"(^|\s)#.*")


def config_with(config: Path | None, options: TorchScriptOptions, work: Path) -> Path | None:
    """The configuration, saying how the file is to be loaded; `config` when there is nothing to add.

    Raises:
        ModelRefused: it has a `torchscript` section of its own that lacks some of it, or is written in a way
            that nothing can be added to.
    """
    text, members = _text(config), members_of(config)
    missing = [line for line in options.lines() if line not in (members or ())]
    if not missing:
        return config
    if members is not None or not _takes_sections(text):
        where = "has a torchscript section that lacks" if members is not None else "lacks"
        raise ModelRefused(
            f"{config} {where} what measured best; add to its section torchscript: {', '.join(missing)}"
        )
    made = work / (config.name if config else "model-config.yaml")
    separator = "" if not text or text.endswith("\n") else "\n"
    added = "".join(f"  {line}\n" for line in missing)
    made.write_text(f"{text}{separator}torchscript:\n{added}", encoding="utf-8")
    return made


def members_of(config: Path | None) -> set[str] | None:
    """The members of the section, each as `name: value`; None when there is no section."""
    found: set[str] | None = None
    inside = False
    for line in _text(config).splitlines():
        said = _COMMENT.sub("", line)
        if said[:1] not in (" ", ""):
            inside = _NAME.match(said) is not None
            found = set() if inside else found
        if inside and found is not None:
            found.update(part.strip(" {}") for part in _NAME.sub("", said).split(","))
    return found


def may_say(config: Path | None) -> bool:
    """Whether how the file is to be loaded is ours to say, and can be said."""
    text = _text(config)
    return members_of(config) is None and _takes_sections(text) and not _AUTOCAST.search(text)


def _takes_sections(text: str) -> bool:
    """Whether a section may follow: not on a mapping in braces, a list, or more than one document."""
    starts = [line[:1] for line in text.splitlines() if line.strip()]
    return not {"{", "[", "-", "."} & set(starts)


def _text(config: Path | None) -> str:
    try:
        return config.read_text(encoding="utf-8") if config else ""
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{config} is not UTF-8: {error}") from error
