"""How the help of every command is laid out."""

from __future__ import annotations

import argparse


def described(parser: argparse.ArgumentParser, description: str, example: str) -> argparse.ArgumentParser:
    """The parser, with a text above its arguments and an example below them."""
    parser.description, parser.epilog = description, f"example: {example}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # an example on one line can be copied
    return parser
