"""Loads Hugging Face model folders (config.json and weights) with transformers.

Nothing is downloaded and no Python in the folder is run. transformers is not needed to serve the result.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.container.entries import problem_with
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.sizes import DECODER_TOKENS, LARGEST, TOKENS, FreeSize, Tensors
from torchere.archiver.models.load.checkpoint import read_weights
from torchere.archiver.models.steps import refusing

_LENGTH = 8  # tokens of the example that is made when none is given
_SECOND_LENGTH = 4  # tokens of that example for the decoder
_SAMPLES = 16000  # one second of sound at 16 kHz
_ADAPTER = "adapter_config.json"
_TOKENIZER = "tokenizer_config.json"
_MADE = "model_input_names"  # the member of a tokenizer's configuration or class that lists its outputs
_OPTIONAL = frozenset({"attention_mask", "token_type_ids"})  # a model fills them in if they are missing
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_NOT_SERVED = (".py", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_OF_OTHERS = (".h5", ".msgpack", ".gguf", ".onnx")
_Places = tuple[tuple[int, int], ...]  # see `FreeSize`


def is_model_folder(path: Path) -> bool:
    """Return whether the folder is a Hugging Face model: it has a model's or an adapter's configuration."""
    return (path / "config.json").is_file() or (path / _ADAPTER).is_file()


@dataclass(frozen=True)
class Loaded:
    """A model of transformers, and an example of its inputs if they are known."""

    model: Any
    example: dict[str, torch.Tensor]  # by name, in the order of `forward`; empty: not known
    sizes: tuple[FreeSize, ...] = ()  # sizes in the example that vary from request to request
    left_out: tuple[str, ...] = ()  # inputs not in the example, because the tokenizer does not make them

    def module(self, names: Sequence[str]) -> torch.nn.Module:
        """Return the model as a module that takes these inputs by position, and passes them on by name.

        Raises:
            ModelRefused: the model has no such input.
        """
        known = _inputs(self.model)
        if unknown := [name for name in names if name not in known]:
            raise ModelRefused(
                f"the example has the input {unknown[0]!r}; {type(self.model).__name__} has "
                f"{', '.join(known)}"
            )
        return _called(self.model, names)

    def names(self, given: Sequence[str] | None, count: int) -> tuple[str, ...]:
        """Return the names of an example's inputs, in the order of `forward`.

        Args:
            given: the names that the example has; None: it has none.
            count: the number of tensors in the example.
        """
        if given is not None:
            order = _inputs(self.model)
            return tuple(sorted(given, key=lambda name: order.index(name) if name in order else len(order)))
        main, order = _main_input(self.model), _inputs(self.model)
        known = [*self.example] or [name for name in order if name == main]
        return tuple(known[:count]) if len(known) >= count else tuple(order[:count])

    def lengths(self, names: Sequence[str], example: Tensors) -> tuple[FreeSize, ...]:
        """Return the dimensions of these inputs that are lengths of texts, as free sizes."""
        most = {free.name: free.high for free in self.sizes}
        return tuple(
            FreeSize(group, places, 1, most.get(group, LARGEST)) for group, places in _lengths(names, example)
        )


def load_folder(path: Path, allow_pickle: bool) -> Loaded:
    """Load a Hugging Face model.

    Raises:
        ModelRefused: transformers is not installed, the architecture is unknown or in the folder's own
            Python, or weights are missing, of another library, or a pickle of more than tensors.
    """
    model = loaded(model_class(path), path, allow_pickle).eval()
    made = _tokenizer_inputs(path)
    example = _example_for(model, () if made is None else _OPTIONAL - made) or _example_for(model)
    left_out = tuple(name for name in _wanted(model) if example and name not in example)
    return Loaded(model, example, _sizes_for(model, example), left_out)


def model_class(path: Path) -> Any:
    """Return transformers' class for the folder; raises as `load_folder`."""
    _refuse_adapter(path)
    architecture = _architecture(path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelRefused(
            f"{path} is a Hugging Face model folder, which needs transformers, and it is not installed; "
            "install torchere[huggingface]"
        )
    _refuse_other_weights(path)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()  # its import has set another level
    transformers.utils.logging.disable_progress_bar()
    known = getattr(transformers, architecture, None)
    if not (isinstance(known, type) and issubclass(known, torch.nn.Module)):
        raise ModelRefused(
            f"{path}: this transformers ({transformers.__version__}) has no model {architecture}; "
            "install one that has; Python in the folder is not run"
        )
    return known


def files_to_serve(path: Path) -> tuple[Path, ...]:
    """Return the files from which a server loads the model: no code, and weights in safetensors only."""
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return tuple(file for file in files if file.suffix not in _NOT_SERVED)


def _refuse_adapter(path: Path) -> None:
    """Raise ModelRefused when the folder has an adapter without the model that the adapter changes."""
    if not (path / _ADAPTER).is_file() or any(path.glob("model*.safetensors")):
        return
    base = _member(path / _ADAPTER, "base_model_name_or_path") or "its model"
    raise ModelRefused(
        f"{path}: an adapter (PEFT) of {base}, without that model; merge it with "
        "PeftModel.from_pretrained(model, folder).merge_and_unload(), save the result with save_pretrained, "
        "and give its folder"
    )


def _refuse_other_weights(path: Path) -> None:
    """Raise ModelRefused, with the names of other weights, when the folder has none for transformers."""
    if any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        return
    others = sorted(file.name for file in path.iterdir() if file.suffix in _OF_OTHERS)
    found = f"; it has {', '.join(others)}, which is of another library" if others else ""
    raise ModelRefused(
        f"{path}: no weights of PyTorch in it (*.safetensors or pytorch_model.bin){found}; load the model "
        "with transformers, and save it with model.save_pretrained(folder)"
    )


def _refuse_shards_elsewhere(path: Path) -> None:
    """Raise ModelRefused when the configuration or an index of shards names files outside of the folder."""
    config = path / "config.json"
    explicit = _member(config, "transformers_weights")  # the weights, or an index in a subfolder
    named = [] if explicit is None else [(config, explicit)]
    for index in path.rglob("*.index.json"):
        shards = _member(index, "weight_map")
        named += [(index, name) for name in shards.values()] if isinstance(shards, dict) else []
    for file, name in named:
        if not isinstance(name, str) or problem_with(name):
            raise ModelRefused(f"{file}: weights should lie in {name!a:.80}; expected a file beside it")


def loaded(known: Any, path: Path, allow_pickle: bool, **more: Any) -> Any:
    """Load a model by transformers' class `known`; `more` are further options of its `from_pretrained`.

    Raises:
        ModelRefused: the weights are damaged, some are missing, or a pickle holds more than tensors.
    """
    _refuse_shards_elsewhere(path)
    is_safe = any(path.glob("*.safetensors"))
    for file in [] if is_safe else sorted(path.glob("pytorch_model*.bin")):
        read_weights(file, allow_pickle)  # refuses a pickle of more than tensors
    options = {"local_files_only": True, "use_safetensors": is_safe, "trust_remote_code": False, **more}
    with refusing(f"{path}: loading {known.__name__}"):
        model, found = known.from_pretrained(str(path), output_loading_info=True, **options)
        missing = sorted(found["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise ModelRefused(
            f"{path}: it lacks {len(missing)} of the weights of {known.__name__}, {missing[0]} for one; get "
            "the whole folder, or name in config.json the architecture that its weights are of"
        )
    return model


class _Called(torch.nn.Module):
    """Calls a model with inputs by name; subclasses have a `forward` with parameters of these names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        known = inspect.signature(model.forward).parameters
        # No KV cache, because it is not sent to clients, and no tuple, because its items have no names.
        self.options = {name: value for name, value in _OPTIONS.items() if name in known}

    def answer(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the output by name, without KV caches and the outputs of submodules."""
        output = self.model(**inputs, **self.options)
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


_OPTIONS = {"return_dict": True, "use_cache": False}


def _called(model: Any, names: Sequence[str]) -> torch.nn.Module:
    pairs = ", ".join(f"{name!r}: {name}" for name in names)
    made: dict[str, Any] = {}
    # The names are parameters of the model's `forward`. Tracers and torch.export read input names from code.
    exec(f"def forward(self, {', '.join(names)}): return self.answer({{{pairs}}})", made)
    module: torch.nn.Module = type("Called", (_Called,), {"forward": made["forward"]})(model)
    return module


def _inputs(model: Any) -> list[str]:
    """Return the names of the parameters of `forward`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _main_input(model: Any) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


# Examples: tensors of the right form for each input that an architecture is known to take. They are kept only
# if the model runs on them.


def _example_for(model: Any, left_out: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return an example for the model, or an empty dict if its inputs are unknown."""
    example = {name: _EXAMPLES[name](model.config) for name in _wanted(model) if name not in left_out}
    return example if example and _runs(model, example) else {}


def _wanted(model: Any) -> list[str]:
    return [name for name in _inputs(model) if name in _EXAMPLES and _takes(model, name)]


def _takes(model: Any, name: str) -> bool:
    """Return whether callers usually pass this input to the model; `forward` may have optional ones."""
    config, main = model.config, _main_input(model)
    reads_text = main == "input_ids"
    return {
        "input_ids": reads_text,
        "attention_mask": reads_text,
        "token_type_ids": reads_text and getattr(config, "type_vocab_size", 0) > 1,
        "bbox": reads_text,
        "pixel_values": main == "pixel_values" or hasattr(config, "vision_config"),
        "decoder_input_ids": bool(getattr(config, "is_encoder_decoder", False)),
    }.get(name, name == main)


def _ids(config: Any, length: int) -> torch.Tensor:
    vocabulary = int(getattr(_text(config), "vocab_size", 50))
    return torch.arange(2 * length).reshape(2, length) % max(min(vocabulary - 2, 50), 1) + 1


def _text(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = int(getattr(vision, "num_channels", None) or 3)
    return _rand(2, channels, int(height), int(width))


def _features(config: Any) -> torch.Tensor:
    frames = 2 * int(getattr(config, "max_source_positions", 1500))  # Whisper's encoder halves them
    return _rand(2, int(getattr(config, "num_mel_bins", 80)), frames)


def _rand(*sizes: int) -> torch.Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(0))


_EXAMPLES: dict[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": lambda config: _ids(config, _LENGTH),
    "attention_mask": lambda config: torch.ones(2, _LENGTH, dtype=torch.int64),
    "token_type_ids": lambda config: (torch.arange(_LENGTH) >= _LENGTH // 2).long().repeat(2, 1),
    "bbox": lambda config: torch.zeros(2, _LENGTH, 4, dtype=torch.int64),
    "decoder_input_ids": lambda config: _ids(config, _SECOND_LENGTH),
    "pixel_values": _pixels,
    "input_values": lambda config: _rand(2, _SAMPLES),
    "input_features": _features,
}
# For each group of inputs that share a length, their names; the length is dimension 1 of each.
_LENGTHS = {
    TOKENS: ("input_ids", "attention_mask", "token_type_ids", "bbox"),
    DECODER_TOKENS: ("decoder_input_ids",),
}


def _runs(model: Any, example: Mapping[str, torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            return bool(_Called(model).answer(example))
    # Broad, because an architecture may need other inputs, and its code may then raise any error.
    except Exception:
        return False


def _sizes_for(model: Any, example: Mapping[str, torch.Tensor]) -> tuple[FreeSize, ...]:
    """Return the lengths of texts as free sizes, up to the longest text that the model accepts."""
    found = _lengths(list(example), list(example.values()))
    return tuple(FreeSize(group, places, 1, _longest(model, example, places)) for group, places in found)


def _lengths(names: Sequence[str], example: Sequence[torch.Tensor]) -> Iterator[tuple[str, _Places]]:
    """Yield each group of inputs that share a length, with the places of the length in the example."""
    for group, members in _LENGTHS.items():
        places = tuple(
            (place, 1) for place, name in enumerate(names) if name in members and example[place].dim() > 1
        )
        if len({example[place].shape[1] for place, _ in places}) == 1:
            yield group, places


def _longest(model: Any, example: Mapping[str, torch.Tensor], places: _Places) -> int:
    """Return the configured maximum length, less padding's positions if it fails (RoBERTa); or LARGEST."""
    config = _text(model.config)
    most = next(
        (
            int(value)
            for name in ("max_position_embeddings", "n_positions", "max_target_positions")
            if isinstance(value := getattr(config, name, None), int) and value > 0
        ),
        None,
    )
    if most is None:
        return LARGEST
    padding = getattr(config, "pad_token_id", None) or 0
    names = list(example)
    for length in (most, most - padding - 1):
        longer = dict(example)
        for index, _ in places:
            longer[names[index]] = example[names[index]][:, torch.arange(length) % _SECOND_LENGTH]
        if _runs(model, longer):
            return length
    return LARGEST


def _architecture(path: Path) -> str:
    names = _member(path / "config.json", "architectures")
    if names is None:
        raise ModelRefused(
            f"{path}/config.json names no architectures; expected the class of its weights, as "
            '"architectures": ["BertModel"]; model.save_pretrained(folder) writes it'
        )
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).isidentifier():
        raise ModelRefused(f"{path}/config.json has the architectures {ascii(names)[:80]}; expected one name")
    return str(names[0])


def _tokenizer_inputs(path: Path) -> frozenset[str] | None:
    """Return the inputs that the folder's tokenizer makes; None if the folder does not say.

    The tokenizer's configuration names the inputs, or else the tokenizer's class does. The class is used only
    for configurations of transformers 5, which name a `backend`: in older versions the defaults of some
    classes had token types, and clients of an older folder may send these. No tokenizer is loaded.
    """
    names = _member(path / _TOKENIZER, _MADE)
    if names is None and _member(path / _TOKENIZER, "backend") is not None:
        transformers: Any = importlib.import_module("transformers")
        kind = getattr(transformers, str(_member(path / _TOKENIZER, "tokenizer_class")), None)
        names = getattr(kind, _MADE, None)
    return frozenset(map(str, names)) if isinstance(names, list) and names else None


def _member(file: Path, name: str) -> Any:
    """Return a member of a JSON file; None if the member is missing or the file is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
