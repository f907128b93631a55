"""A package of the archive, with a relative import."""

from .rules import longest as _longest  # noqa: TID252 - as people write it

WORDS = {"a": "ant", "b": "badger"}
LONGEST = _longest(WORDS)


def lookup(key):
    return WORDS[key]
