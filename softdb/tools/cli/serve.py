"""The commands that serve a database: `softdb explore` to a browser, `softdb mcp` to a language model."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from softdb.errors import BadInput
from softdb.terminal import terminal
from softdb.tools.cli.arguments import Database, EncoderName
from softdb.tools.cli.served import HOST, PORT, Served

if TYPE_CHECKING:
    from softdb.database import SoftDB


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
        Served(path, encoder) if path is not None else Served(None, db=_demo_database(encoder)) as served,
        listening(port) as listener,
        tempfile.TemporaryDirectory(prefix="softdb-explore-") as folder,
    ):
        number = listener.getsockname()[1]
        note_warnings()
        answers = Answers(served)
        answers.map()  # computed now: a failure shows here, and the first page need not wait
        token = secrets.token_urlsafe(16)
        app, desk = application(answers, frozenset({f"{HOST}:{number}", f"localhost:{number}"}), token)
        address = f"http://{HOST}:{number}/{token}/"
        terminal().print(f"softdb explore: {address} (Ctrl-C ends it)", soft_wrap=True)
        if open_:
            import webbrowser

            # other accounts can list the browser's arguments, but cannot read this file
            page = Path(folder) / "open.html"
            page.write_text(f'<meta http-equiv="refresh" content="0; url={address}">')
            webbrowser.open(page.as_uri())
        try:
            uvicorn.Server(configured(app)).run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # Ctrl-C is the way to stop the server
        finally:
            desk.close()


def _demo_database(encoder: str | None) -> SoftDB:
    """Return the database of `softdb demo` in memory; `encoder`: the option --encoder, which may name its model."""
    import softdb
    from softdb.data import load_wordnet
    from softdb.data.encoder import DEMO, KnownWords
    from softdb.tools.demo import SETTINGS, insert

    if encoder not in (None, DEMO):
        raise BadInput(f"--encoder is {encoder!r}, but the keys of --demo were made by 'demo'; leave it out")
    data = load_wordnet()
    db = softdb.open(None, encoder=KnownWords(data, has_model=encoder is not None), **SETTINGS)
    insert(db, data, slice(None))
    db.index_text()
    return db


def mcp(path: Database, encoder: EncoderName = None) -> None:
    """Serve a database to a language model, read-only, on standard input and output; MCP clients start this command."""
    from softdb.tables.arrow_tables import needed

    needed("mcp", "mcp", "softdb mcp")
    from softdb.tools.mcp.tools import Tools

    with Served(path, encoder) as served:
        Tools(served).server().run("stdio")
