from __future__ import annotations

import pytest

from torchere.handlers.text import CONTRACTIONS, expand_contractions


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("don't", "do not"),
        ("Don't", "Do not"),
        ("I'd've said he's right", "I would have said he is right"),
        ("can't've", "cannot have"),
        ("she's", "she is"),
        ("we're they'll you've", "we are they will you have"),
        ("won't shan't ain't", "will not shall not is not"),
        ("'cause", "because"),
        ("the dog's bone", "the dogs bone"),
        ("WON'T", "Will not"),
        ("", ""),
    ],
)
def test_contractions_are_written_out_and_apostrophes_dropped(text: str, expanded: str) -> None:
    assert expand_contractions(text) == expanded


def test_the_table_covers_common_english() -> None:
    assert len(CONTRACTIONS) >= 120
