"""The methods of `--quantize`: names, help texts and limits. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

INT8_DRIFT, BF16_DRIFT = 0.25, 0.05
SAME_DRIFT = 1e-3  # limit for a conversion without quantisation, which only changes the order of sums
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Method:
    """One value of `--quantize`."""

    help: str
    max_drift: float  # of the outputs (`measure/difference.py`), unless the user sets another limit
    tries: tuple[str, ...] = ()  # the methods that this method chooses from
    gains: str = ""  # where this method is faster than fp32: advice for models that do not gain


_BY_WEIGHTS = (
    "where layers of a million weights and more meet few rows (a batch of one, one token); int8-dynamic "
    "computes in 8 bits, too"
)
METHODS: dict[str, Method] = {
    "int8-static": Method(
        "weights and activations in 8 bits, ranges measured on --samples, which it needs", INT8_DRIFT
    ),
    "int8-dynamic": Method("weights in 8 bits, activations scaled at each call", INT8_DRIFT),
    "int8": Method(
        "the faster of these two that stays within --max-drift; without --samples int8-dynamic only; with "
        "the formats export and aoti int8-static, which needs --samples",
        INT8_DRIFT,
        ("int8-static", "int8-dynamic"),
    ),
    "int8-trained": Method(
        "for a model that was trained for int8 (QAT) or is int8 already, only chooses the engine", INT8_DRIFT
    ),
    "int8-weight": Method(
        "weights of linear layers and embeddings in 8 bits, products in bfloat16; for large layers that meet "
        "few rows, and where int8-dynamic drifts too far",
        BF16_DRIFT,
        gains=_BY_WEIGHTS,
    ),
    "int4-weight": Method(
        "likewise in 4 bits; with the formats export and aoti", INT8_DRIFT, gains=_BY_WEIGHTS
    ),
    "bf16": Method(
        "weights and sums in bfloat16, where the processor has it",
        BF16_DRIFT,
        gains="on large matrix multiplications only",
    ),
    AUTO: Method(
        "tries those of the above that suit the model, and packs the fastest that stays within its limit, or "
        "fp32 where none gains",
        INT8_DRIFT,
        ("int8-static", "int8-dynamic", "bf16", "int8-weight"),
    ),
}


def limits_in_words() -> str:
    """Return the default limits for a help text: each with its methods, and the one without quantisation."""
    of_limit: dict[float, list[str]] = {}
    for name, method in METHODS.items():
        of_limit.setdefault(method.max_drift, []).append(name)
    named = [f"{limit} with --quantize {', '.join(names)}" for limit, names in of_limit.items()]
    return "; ".join([*named, f"{SAME_DRIFT} without --quantize, more for weights in 16 bits"])


def max_drift_of(method: str | None) -> float:
    """Return the default limit of a method; None: that of a conversion without quantisation."""
    return SAME_DRIFT if method is None else METHODS[method].max_drift
