"""What `benchmarks/memory.py` reads and judges."""

import memory
import pytest
from harness.models import Workshop
from harness.pss import pss_of

ROLLUP = """5580a0-7ffd00 ---p 00000000 00:00 0                          [rollup]
Rss:               10000 kB
Pss:                2048 kB
Pss_Dirty:           100 kB
"""


def test_pss_is_read_in_bytes():
    assert pss_of(ROLLUP) == 2048 * 1024


def test_a_process_that_has_ended_takes_nothing():
    assert pss_of("") == 0


def test_a_figure_says_whether_its_goal_is_reached():
    reached = memory.Figure("tensors", "at rest, server alone", 80.0, limit=memory.SERVER_MB).line
    missed = memory.Figure("large", "thread, 2 versions, to 1 executor", 1.2, "", 1.15).line
    free = memory.Figure("density", "100 models", 2000.0).line
    assert reached.endswith("80 MB   goal: at most 94 MB   reached")
    assert missed.endswith("1.20      goal: at most 1.15    MISSED")
    assert free.endswith("2000 MB")


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        memory.main(["--parts", "small"])
    assert "expected large, tensors, density, cycles" in capsys.readouterr().err


def test_models_of_different_seeds_share_no_file(tmp_path):
    shop = Workshop(tmp_path)
    assert shop.mlp(4, 1, seed=1).read_bytes() != shop.mlp(4, 1, seed=2).read_bytes()
