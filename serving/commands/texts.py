"""The layout of the help texts of all commands."""

from __future__ import annotations

import argparse


def described(parser: argparse.ArgumentParser, description: str, example: str) -> argparse.ArgumentParser:
    """Set the description above the arguments and the example below them; return the parser."""
    return explained(parser, description, f"example: {example}")


def explained(parser: argparse.ArgumentParser, description: str, examples: str) -> argparse.ArgumentParser:
    """Set the description above the arguments and the text below them; return the parser."""
    parser.description, parser.epilog = description, examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps examples on one line
    return parser
