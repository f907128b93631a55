"""How the help of every command is laid out."""

from __future__ import annotations

import argparse


def described(parser: argparse.ArgumentParser, description: str, example: str) -> argparse.ArgumentParser:
    """The parser, with a text above its arguments and an example below them."""
    return explained(parser, description, f"example: {example}")


def explained(parser: argparse.ArgumentParser, description: str, examples: str) -> argparse.ArgumentParser:
    """As `described`, with a text of its own below the arguments."""
    parser.description, parser.epilog = description, examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # an example on one line can be copied
    return parser
