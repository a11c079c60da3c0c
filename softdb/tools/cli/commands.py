"""The commands by name. A command is imported when it is called, so that `softdb --help` does not wait for torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from softdb import misnomers
from softdb.errors import SoftDBError
from softdb.tools.cli.endings import exit_code, warn_in_one_line

COMMANDS = {
    "demo": "softdb.tools.cli.transfer:demo",
    "import": "softdb.tools.cli.transfer:import_",
    "export": "softdb.tools.cli.transfer:export",
    "insert": "softdb.tools.cli.by_id:insert",
    "delete": "softdb.tools.cli.by_id:delete",
    "get": "softdb.tools.cli.by_id:get",
    "count": "softdb.tools.cli.by_id:count",
    "search": "softdb.tools.cli.ask:search",
    "attend": "softdb.tools.cli.ask:attend",
    "train": "softdb.tools.cli.learn:train",
    "reembed": "softdb.tools.cli.learn:reembed",
    "index": "softdb.tools.cli.upkeep:index",
    "tune": "softdb.tools.cli.upkeep:tune",
    "fields": "softdb.tools.cli.upkeep:fields",
    "info": "softdb.tools.cli.upkeep:info",
    "verify": "softdb.tools.cli.upkeep:verify",
    "compact": "softdb.tools.cli.upkeep:compact",
    "snapshot": "softdb.tools.cli.upkeep:snapshot",
    "explore": "softdb.tools.cli.serve:explore",
    "mcp": "softdb.tools.cli.serve:mcp",
    "bench": "softdb.tools.bench.command:bench",
}
WIDE = 60  # columns of a terminal from which on the help of a command is drawn in boxes
HELP = """\
Usage: softdb COMMAND DATABASE …        softdb COMMAND --help lists its options
A vector database you can backpropagate through: a directory, no server.

  demo               try it: store, search and train on 20,000 definitions
  import, export     make a database of files; write its records to files
  insert, delete     insert JSON lines from a pipe; delete by id or by filter
  get, count         print records, all or by id or filter; count them
  search             find the records nearest to a text or a vector
  attend             soft query: mean of all, weighted by softmax(score / T)
  train              learn a projection of the queries from pairs
  reembed            compute every key again with another encoder
  index, tune        make searches fast; measure and set their recall
  fields             index fields of the payload: filters on them are fast
  info, verify       show a database; compare every byte with its checksum
  compact, snapshot  free disk space; copy the database while others write
  explore            search, soft queries and a map in a browser
  mcp                serve a database to a language model, read-only
  bench              compare recall, speed and memory with other engines

With --json a command prints one line of JSON. - is standard input or output.
Exit codes: 0 done, 1 error, 2 usage, 3 no such id, 4 locked by another writer.
Options: --version, --show-completion SHELL, --install-completion, --help.
"""


class _Commands(TyperGroup):
    """Import a command when it is called; turn errors of softdb and of the system into one line and an exit code."""

    as_json = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        is_wide = shutil.get_terminal_size().columns >= WIDE  # narrow boxes cut the options' names
        single = typer.Typer(add_completion=False, rich_markup_mode="rich" if is_wide else None)
        single.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}{misnomers.own_name(args[0], misnomers.COMMANDS, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(HELP)

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command line. If the parser refuses an argument, print one line of error and exit with code 2."""
        words = list(sys.argv[1:] if args is None else args)
        self.as_json = "--json" in words[: words.index("--") if "--" in words else None]
        if words[:1] == ["--show-completion"] and len(words) == 2:  # for any shell, not only the one in use
            os.environ["_SOFTDB_COMPLETE"] = f"source_{words[1]}"
            words = []
        try:
            code = super().main(words or ["--help"], standalone_mode=False, **extra)
        except Exception as error:
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            code = exit_code(error, self.as_json)
        if not standalone_mode:
            return code
        sys.exit(code or (not words and 2) or 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            super().invoke(ctx)
            sys.stdout.flush()  # raises BrokenPipeError here if the reader has closed the pipe
        except (SoftDBError, OSError, KeyboardInterrupt) as error:
            command = ctx.invoked_subcommand and self.get_command(ctx, ctx.invoked_subcommand)
            sys.exit(exit_code(error, self.as_json, command or None))


app = typer.Typer(
    cls=_Commands,
    name="softdb",
    help="A durable vector database you can backpropagate through.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def run() -> None:
    """Run the command line."""
    # torch reads this at import: on a busy machine, threads that sleep while waiting are ten times as fast as spinning
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warn_in_one_line("--json" in sys.argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a letter that the terminal's encoding lacks is no error
    app(prog_name="softdb")


def _version(requested: bool) -> None:
    if requested:
        import softdb

        typer.echo(f"softdb {softdb.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
