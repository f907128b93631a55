"""The plot of the README shows the figures of the benchmark document."""

import pytest
import throughput
from harness.paths import DOCUMENT, PLOT

TABLE = """Measured today on AMD EPYC, 2 cores, 23 GiB; torchere 0.1.0 (commit abc123); 2 rounds.

## Tiny MLP, thread executors

|  | req/s, 1 client | req/s, 32 |
| --- | --- | --- |
"""
ROW = "| {} | 1 (1-1) | {} (1-2) |\n"


def document(**rates: str) -> str:
    rows = {name: "1,000" for name in throughput.LABELS} | rates
    return TABLE + "".join(ROW.format(name, rate) for name, rate in rows.items()) + "\n## Other\n"


def test_the_plot_is_that_of_the_document():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert PLOT.read_text(encoding="utf-8") == throughput.drawn(text)


def test_the_fastest_comes_first_and_fills_the_width():
    text = document(torchere="2,000", triton="4,000")
    assert list(throughput.rates(text).items())[:3] == [
        ("triton", 4000.0),
        ("torchere", 2000.0),
        ("mosec, orjson", 1000.0),
    ]
    plot = throughput.drawn(text)
    assert plot.index("Triton") < plot.index(">torchere<") < plot.index("LitServe")
    assert f'width="{throughput._WIDTH / 2:.1f}" height' in plot
    assert "AMD EPYC, 2 cores, commit abc123" in plot


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Benchmarks", "found no table"),
        (document().replace("| mosec |", "| other |"), "the table lacks mosec"),
        (document().partition("##")[2].join(["##", ""]), "found no line 'Measured"),
    ],
    ids=["no table", "a contender is missing", "no machine"],
)
def test_a_document_without_the_figures_is_refused(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        throughput.drawn(text)
