from __future__ import annotations

import copy
from typing import Any

import pytest

from torchere.handlers.loading.compile import check_valid_pt2_backend, compile_options, wants_aot_compile


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, None),
        ({"pt2": "inductor"}, {"backend": "inductor"}),
        ({"pt2": {"backend": "eager", "mode": "default"}}, {"backend": "eager", "mode": "default"}),
        ({"pt2": {"compile": {"enable": True, "backend": "inductor"}}}, {"backend": "inductor"}),
        ({"pt2": {"compile": {"enable": True, "mode": "reduce-overhead"}}}, {"mode": "reduce-overhead"}),
        ({"pt2": {"compile": {"enable": False, "backend": "inductor"}}}, None),
        ({"pt2": {"compile": {"backend": "inductor"}}}, None),
        ({"pt2": {"compile": {"enable": True, "backend": "abacus"}}}, None),
        ({"pt2": "abacus"}, None),
        ({"pt2": {"export": {"aot_compile": True}}}, None),
    ],
)
def test_the_pt2_block_says_how_to_compile(config: dict[str, Any], options: dict[str, Any] | None) -> None:
    before = copy.deepcopy(config)
    assert compile_options(config) == options
    assert config == before


@pytest.mark.parametrize("pt2", [3, ["inductor"], {"compile": True}])
def test_a_block_of_the_wrong_type_is_refused(pt2: object) -> None:
    with pytest.raises(ValueError, match="should be"):
        compile_options({"pt2": pt2})


def test_an_unknown_backend_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not check_valid_pt2_backend("abacus")
    assert "abacus is not a supported backend" in caplog.text


def test_compiled_weights_are_announced_in_the_config() -> None:
    assert wants_aot_compile({"pt2": {"export": {"aot_compile": True}}})
    assert not wants_aot_compile({"pt2": {"export": True}})
    assert not wants_aot_compile({"pt2": "inductor"})
