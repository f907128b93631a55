"""Every fuzz target on the cases found so far, on its seeds, and on mutations of them, without atheris.

`make fuzz` searches; this keeps. A case is a file `found/TARGET-HASH`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, Target, run

FOUND = Path(__file__).with_name("found")
MUTATIONS = 250  # for each target: some seconds for all
RARE = (b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\0\0\0\0", b"9" * 20, b"\r\n", b"..", b"%")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the warnings about inputs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def mutated(data: bytes, others: list[bytes], target: Target, chance: random.Random) -> bytes:
    """An input with one to four changes: bytes replaced, removed, repeated or moved in from another input."""
    text = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(text))
        size = chance.choice((1, 1, 2, 4, 16, 64))
        change = chance.randrange(5)
        if change == 0 and text:
            text[at % len(text)] = chance.randrange(256)
        elif change == 1:
            del text[at : at + size]
        elif change == 2:
            text[at:at] = text[at : at + size] * chance.choice((1, 2, 50))
        elif change == 3:
            other = chance.choice(others)
            start = chance.randint(0, len(other))
            text[at:at] = other[start : start + size]
        else:
            text[at : at + chance.choice((0, 1, 4))] = chance.choice(target.tokens + RARE)
    return bytes(text[: target.max_bytes])


# Damaged pickles hold escapes that pickletools warns of; those that it refuses are read as `UNKNOWN`.
@pytest.mark.filterwarnings("ignore:.*invalid escape sequence:DeprecationWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_accepts_its_seeds_and_mutations_of_them(name: str) -> None:
    target, chance = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    for seed in seeds:
        run(target, seed)
    for number in range(MUTATIONS):
        run(target, mutated(seeds[number % len(seeds)], seeds, target, chance))


@pytest.mark.parametrize("case", sorted(FOUND.glob("*-*")), ids=lambda case: case.name)
def test_a_case_that_was_found_once_is_none_any_more(case: Path) -> None:
    run(TARGETS[case.name.partition("-")[0]], case.read_bytes())


def test_seeds_fit_their_targets() -> None:
    for name, target in TARGETS.items():
        assert all(len(seed) <= target.max_bytes for seed in target.seeds()), name
