"""English contractions and their long forms."""

from __future__ import annotations

import re

# Pronouns and question words take regular endings; `'s` and `'d` are read as "is" and "would".
_PRONOUNS = ("i", "you", "he", "she", "it", "we", "they")
_POINTERS = ("that", "there", "this", "who", "what", "when", "where", "why", "how")
_ENDINGS = {"'ll": "will", "'ve": "have", "'d": "would", "'d've": "would have", "'ll've": "will have"}
_WITH_IS = ("he", "she", "it", "here", *_POINTERS)
_WITH_ARE = ("you", "we", "they", "what", "who", "there")
_AUXILIARIES = ("are", "is", "was", "were", "do", "does", "did", "have", "has", "had", "may", "might", "must")
_NEGATED = (*_AUXILIARIES, "could", "should", "would", "need", "ought", "dare")

_IRREGULAR = {
    "ain't": "is not",
    "can't": "cannot",
    "can't've": "cannot have",
    "shan't": "shall not",
    "won't": "will not",
    "won't've": "will not have",
    "i'm": "i am",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "y'all": "you all",
    "y'all're": "you all are",
    "'cause": "because",
    "so's": "so as",
    "so've": "so have",
    "to've": "to have",
    "could've": "could have",
    "might've": "might have",
    "must've": "must have",
    "should've": "should have",
    "would've": "would have",
    "will've": "will have",
    "how'd'y": "how do you",
    "how'd": "how did",
}


def _table() -> dict[str, str]:
    table = {
        subject + ending: f"{subject} {words}"
        for subject in (*_PRONOUNS, *_POINTERS)
        for ending, words in _ENDINGS.items()
    }
    table |= {f"{subject}'s": f"{subject} is" for subject in _WITH_IS}
    table |= {f"{subject}'re": f"{subject} are" for subject in _WITH_ARE}
    table |= {f"{verb}n't": f"{verb} not" for verb in _NEGATED}
    table |= {
        f"{verb}n't've": f"{verb} not have" for verb in ("could", "might", "must", "should", "would", "had")
    }
    return table | _IRREGULAR


CONTRACTIONS = _table()
# Longest first: "can't've" must not end as "cannot've".
_PATTERN = re.compile(
    r"(?<!\w)(?:" + "|".join(map(re.escape, sorted(CONTRACTIONS, key=len, reverse=True))) + r")(?!\w)",
    re.IGNORECASE,
)


def expand_contractions(text: str) -> str:
    """Write contractions out ("Don't" as "Do not") in the case of their first letter; drop apostrophes."""

    def written_out(match: re.Match[str]) -> str:
        expanded = CONTRACTIONS[match.group().lower()]
        return expanded.capitalize() if match.group()[0].isupper() else expanded

    return _PATTERN.sub(written_out, text).replace("'", "")
