"""The argument parser and the help texts of all commands: argparse's, with suggestions for misspelt names."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")

_LONG_USAGE = 6  # lines: a longer usage hides the message after it


class Parser(argparse.ArgumentParser):
    """Suggests the nearest option, command or choice; shows the usage of the command that was given.

    `hints` maps options and commands of other programs, which this program lacks, to advice.
    """

    hints: Mapping[str, str] = {}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse all arguments; exit with status 2 if one is unknown."""
        words = list(sys.argv[1:] if args is None else args)
        found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            command = self._command(words)
            hints = getattr(command, "hints", {})
            suggestions = [
                f"; {hint}"
                if (hint := hints.get(word.partition("=")[0]))
                else _suggestion(word, command._option_string_actions)
                for word in unknown
            ]
            command.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(suggestions)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Print the usage, shortened if long, and the message to standard error; exit with status 2."""
        if choice := _CHOICE.search(message):
            hint = self.hints.get(choice.group(1))
            known = re.findall(r"[\w.-]+", choice.group(2))
            message += f"; {hint}" if hint else _suggestion(choice.group(1), known)
        usage = self.format_usage()
        if usage.count("\n") > _LONG_USAGE:
            usage = f"usage: {self.prog} ... ({self.prog} --help lists what it takes)\n"
        self.exit(2, f"{usage}{self.prog}: error: {message}\n")

    def _command(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the innermost command among the words."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names = [word for word in words if word in action.choices]
                command = action.choices[names[0]] if names else self
                return command._command(words) if names and isinstance(command, Parser) else command
        return self


def described(parser: argparse.ArgumentParser, description: str, example: str) -> argparse.ArgumentParser:
    """Set the description above the arguments and the example below them; return the parser."""
    return explained(parser, description, f"example: {example}")


def explained(parser: argparse.ArgumentParser, description: str, examples: str) -> argparse.ArgumentParser:
    """Set the description above the arguments and the text below them; return the parser."""
    parser.description, parser.epilog = description, examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps examples on one line
    return parser


def _suggestion(word: str, known: Collection[str]) -> str:
    # With the default cutoff of 0.6, --port would count as near to --format, because both have dashes.
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""
