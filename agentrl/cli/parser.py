"""argparse's parser, whose errors name what is near: of a command, a choice or an option."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from agentrl.errors import hinted

_CHOICE = re.compile(r"invalid choice: '?(?P<word>.*?)'? \(choose from (?P<known>.*)\)$")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<word>--?[\w-]+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def seed(text: str) -> int:
    """A seed as an option takes it: a whole number of at least 0."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return number


class Parser(argparse.ArgumentParser):
    """Its subcommands are parsed by the same class; `parser` of what it returns is the innermost one that took part."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse's, but that words of which there may be none (`a.b=c`) are not named as missing beside what is."""
        if options.get("nargs") == "*" and not names[0].startswith("-"):
            options.setdefault("default", [])
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A command with a default for `passed_on` gets what stands behind `--` in it, unparsed."""
        if args is None or "--" not in args or self.get_default("passed_on") is None:
            return super().parse_known_args(args, namespace)
        words = list(args)
        found, rest = super().parse_known_args(words[: words.index("--")], namespace)
        found.passed_on = words[words.index("--") + 1 :]
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and usage, the message and, if something is near what was typed, its name."""
        # From the text, which is all that argparse gives: its own way to suggest a name came with Python 3.14.
        if choice := _CHOICE.search(message):
            known = choice["known"].replace("'", "").split(", ")
            message = f"{message}{hinted(choice['word'], known)}"
        elif unknown := _UNKNOWN.search(message):
            message = f"{message}{hinted(unknown['word'], _OPTION.findall(self.format_help()))}"
        super().error(message)
