"""`--parallel`: a model is tried over ranks, and its configuration asks the server for them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.files import config_text, takes_sections
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.load.source import EAGER, HUGGING_FACE, Source
from torchere.archiver.models.spread import spread
from torchere.archiver.models.spread.huggingface import spread_folder
from torchere.archiver.models.spread.trial import told, try_split
from torchere.archiver.models.steps import Say, step
from torchere.archiver.request import KEEP, BuildOptions
from torchere.archiver.split import SECTION, Split

# The section with its block; other programs may have one of this name.
_SECTION = re.compile(rf"""^["']?{SECTION}["']?:(.*(?:\n[ \t]+.*)*)""", re.MULTILINE)
_IS_OURS = re.compile(r"""[{\s,"'](?:tensor|pipeline)["']?\s*:""")


def _refuse_ranks(config: Path | None) -> None:
    """Raise ModelRefused if `config` spreads the model over ranks: then it has to stay a class.

    Its weights may be elsewhere, and the class alone would be converted with weights that it makes up.
    """
    section = _SECTION.search(config_text(config))
    if section is not None and _IS_OURS.search(section[1]):
        raise ModelRefused(
            f"{config} has the section {SECTION}, which spreads a class over ranks, and a converted model is "
            "none; take the section out and give the model with its weights"
        )


def with_ranks(
    source: Source, example: Tensors | None, options: BuildOptions, work: Path, say: Say
) -> BuildOptions:
    """Try the model over the ranks of `options.parallel`; return options whose configuration asks for them.

    Raises:
        ModelRefused: the model can't be spread, answers differently, or the configuration takes no section.
    """
    module, path, split = source.module, source.path, options.parallel
    if options.model_format != KEEP:
        _refuse_ranks(options.config_file)
    if split is None:
        return options
    if module is None or source.kind not in (EAGER, HUGGING_FACE):
        raise ModelRefused(
            f"{path}: {source.kind} can't be spread over ranks; expected a class (--model-file) or a Hugging "
            "Face folder"
        )
    if example is None:
        raise ModelRefused("--parallel is tried before the model is packed: give --example with inputs")
    if split.weights:
        if options.serialized_file is not None:
            raise ModelRefused(
                f"{path} has weights, and --parallel says that they are at {split.weights}; leave out one of "
                "them, and give the class (--model-file)"
            )
        say(f"the weights are those that the class makes; those at {split.weights} are not read here")
    config = _config_with(options.config_file, split, work)

    def part(device: torch.device) -> torch.nn.Module:
        if source.folder is None:
            return spread(module, split, device)
        model = spread_folder(path, split, device)
        return replace(source.folder, model=model).module(source.names_of_inputs(len(example)))

    with step(say, f"trying {split.ranks} ranks"):
        outcome = try_split(module, part, split.ranks, example, say)
    say(told(outcome))
    return replace(options, config_file=config)


def _config_with(config: Path | None, split: Split, work: Path) -> Path:
    """Write a copy of the configuration that has the section `parallel`."""
    text = config_text(config)
    if _SECTION.search(text):
        raise ModelRefused(
            f"{config} has a section {SECTION}; take it out, and --parallel writes the one that was tried"
        )
    if not takes_sections(text):
        raise ModelRefused(f"{config} takes no section as it is written; add to it: {split.line()}")
    made = work / (config.name if config else "model-config.yaml")
    separator = "" if not text or text.endswith("\n") else "\n"
    made.write_text(f"{text}{separator}{split.line()}\n", encoding="utf-8")
    return made
