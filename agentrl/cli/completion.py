"""`agentrl completion`: what makes a shell complete commands, options, configs, environments, runs, and keys of overrides."""

from __future__ import annotations

import argparse

from agentrl.shown import say

HELP = "print the shell completion of bash, zsh or fish"
EPILOG = """examples:
  eval "$(agentrl completion bash)"                     in ~/.bashrc
  eval "$(agentrl completion zsh)"                      in ~/.zshrc, after compinit
  agentrl completion fish > ~/.config/fish/completions/agentrl.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it; returns the exit code."""
    from argcomplete.shell_integration import shellcode

    say(shellcode(["agentrl"], shell=args.shell))
    return 0
