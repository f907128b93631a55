"""The checks of TorchServe's own tests, against torchere; `torchserves_suite.py` asks TorchServe, too."""

import sys
from pathlib import Path

import pytest
from suite.groups import GROUPS, Group
from suite.running import DIFFERS, name_of, outcomes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_what_torchserves_tests_ask_is_answered_as_they_expect(group: Group, tmp_path: Path) -> None:
    found = {
        name_of(each): failure for each, failure in outcomes(group, tmp_path, Path(sys.executable).parent)
    }
    unexplained = {name: failure for name, failure in found.items() if failure and name not in DIFFERS}
    assert unexplained == {}
    assert [name for name in DIFFERS if name in found and not found[name]] == []  # no longer a difference


def test_each_difference_is_a_section_of_the_document() -> None:
    text = (ROOT / "docs" / "differences.md").read_text()
    assert [section for section in DIFFERS.values() if f"### {section}\n" not in text] == []
