"""The command `softdb`. What it needs is imported when a command runs: `softdb --help` must not wait for torch."""

from softdb.cli.commands import app, main

__all__ = ["app", "main"]
