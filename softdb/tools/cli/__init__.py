"""The command `softdb` (extra `softdb[cli]`). Each command imports its libraries when it runs."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        from softdb.tools.cli.commands import run
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("typer", "click", "rich"):
            raise
        sys.exit("error: the command line needs typer and rich; pip install 'softdb[cli]', or 'softdb[cpu]'")
    run()
