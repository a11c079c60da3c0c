"""The commands that serve a database: `softdb explore` to a browser, `softdb mcp` to a language model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from softdb.errors import BadInput
from softdb.terminal import terminal
from softdb.tools.cli.arguments import Database, EncoderName
from softdb.tools.cli.served import HOST, PORT, Served

if TYPE_CHECKING:
    from softdb.database import SoftDB

FIRST = "violin"  # the first query of --demo


def explore(
    path: Annotated[Path | None, Argument(metavar="[PATH]", help="The database's directory.")] = None,
    demo: Annotated[bool, Option("--demo", help="Show 20,000 dictionary definitions instead of PATH.")] = False,
    encoder: EncoderName = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help=f"TCP port; 0: any free one. By default {PORT}, or any free one.")
    ] = None,
    open_: Annotated[bool, Option("--open", help="Open the browser, too.")] = False,
) -> None:
    """Show a database in a browser on this machine: search, soft queries at any temperature, a map; read-only."""
    from softdb.tables.arrow_tables import needed

    needed("starlette", "explore", "softdb explore")
    uvicorn = needed("uvicorn", "explore", "softdb explore")
    from softdb.tools.explore.replies import Answers, note_warnings
    from softdb.tools.explore.server import application, configured, listening

    if (path is None) != demo:
        raise BadInput("explore needs either PATH or --demo; give the directory of a database, or --demo")
    with (
        Served(path, encoder) if path is not None else Served(None, db=_demo_database()) as served,
        listening(port) as listener,
    ):
        number = listener.getsockname()[1]
        note_warnings()
        answers = Answers(served, FIRST if demo else None)
        answers.map()  # computed now: a failure shows here, and the first page need not wait
        app, desk = application(answers, frozenset({f"{HOST}:{number}", f"localhost:{number}"}))
        address = f"http://{HOST}:{number}/"
        terminal().print(f"softdb explore: {address} (Ctrl-C ends it)", soft_wrap=True)
        if open_:
            import webbrowser

            webbrowser.open(address)
        try:
            uvicorn.Server(configured(app)).run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # Ctrl-C is the way to stop the server
        finally:
            desk.close()


def _demo_database() -> SoftDB:
    """Return a database in memory with WordNet's definitions, their vectors and texts."""
    import softdb
    from softdb.data import load_wordnet
    from softdb.data.encoder import KnownWords

    data = load_wordnet()
    db = softdb.open(None, dim=data.keys.shape[1], metric="cosine", encoder=KnownWords(data), fields=["pos"])
    db.insert(
        data.ids, data.keys, texts=[payload["gloss"] for payload in data.payloads],
        payloads=[{name: payload[name] for name in ("word", "lemmas", "pos")} for payload in data.payloads],
    )  # fmt: skip
    db.index_text()
    return db


def mcp(path: Database, encoder: EncoderName = None) -> None:
    """Serve a database to a language model, read-only, on standard input and output; MCP clients start this command."""
    from softdb.tables.arrow_tables import needed

    needed("mcp", "mcp", "softdb mcp")
    from softdb.tools.mcp.tools import Tools

    with Served(path, encoder) as served:
        Tools(served).server().run("stdio")
