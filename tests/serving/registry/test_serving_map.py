"""The serving map: what is found in it, and what goes out of it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchere.serving.errors import ModelNotFound, VersionNotFound
from torchere.serving.registry.serving_map import (
    EMPTY,
    find,
    with_default,
    with_version,
    without_version,
)
from torchere.serving.registry.version import Version
from torchere.serving.types import ModelKey


def version(number: str) -> Version:
    return cast(Version, SimpleNamespace(key=ModelKey("m", number)))


def test_the_first_version_of_a_model_is_its_default() -> None:
    first, second = version("1"), version("2")
    serving = with_version(with_version(EMPTY, first), second)
    assert find(serving, "m", None) is first
    assert find(serving, "m", "2") is second
    with pytest.raises(VersionNotFound, match="3"):
        find(serving, "m", "3")


def test_a_version_that_goes_takes_nobody_of_its_name_along() -> None:
    old, new = version("1"), version("1")
    serving: Any = with_version(without_version(with_version(EMPTY, old), old), new)
    assert find(without_version(serving, old), "m", "1") is new


def test_a_version_may_go_twice() -> None:
    only = version("1")
    gone = without_version(with_version(EMPTY, only), only)
    assert without_version(gone, only) == gone == {}
    with pytest.raises(ModelNotFound):
        find(gone, "m", None)


def test_a_model_whose_default_goes_has_the_oldest_of_the_others() -> None:
    first, second, third = (version(number) for number in "123")
    serving = with_version(with_version(with_version(EMPTY, first), second), third)
    assert find(without_version(serving, first), "m", None) is second
    chosen = with_default(serving, "m", "3")
    assert find(without_version(chosen, first), "m", None) is third
