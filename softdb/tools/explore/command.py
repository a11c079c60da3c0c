"""`softdb explore`: a database in the browser."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from softdb.errors import BadInput, MissingDependency
from softdb.terminal import terminal
from softdb.tools.cli.arguments import EncoderName

if TYPE_CHECKING:
    import uvicorn

    from softdb.tools.cli.served import Served
    from softdb.tools.explore.guard import Guard

__all__ = ["configured", "explore"]

HOST, PORT = "127.0.0.1", 8730
FIRST = "violin"  # what the demo shows first


def explore(
    path: Annotated[Path | None, Argument(metavar="[PATH]", help="The database's directory.")] = None,
    demo: Annotated[bool, Option("--demo", help="20,000 dictionary definitions, in memory, in place of PATH.")] = False,
    encoder: EncoderName = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help=f"{PORT}, or another where that is taken; 0: any that is free.")
    ] = None,
    open_: Annotated[bool, Option("--open", help="Open the browser, too.")] = False,
) -> None:
    """Show a database in a browser of this machine: search, soft queries at any temperature, a map; read-only."""
    try:
        import starlette  # noqa: F401 - what the page is served by
        import uvicorn
    except ImportError:
        raise MissingDependency("softdb explore needs Starlette and uvicorn; pip install 'softdb[explore]'") from None
    from softdb.tools.explore.answers import Answers
    from softdb.tools.explore.notes import note_warnings
    from softdb.tools.explore.server import application

    if (path is None) != demo:
        raise BadInput("give the directory of a database, or --demo, one of them")
    with _served(path, encoder) as served, _listening(port) as listener:
        number = listener.getsockname()[1]
        note_warnings()
        answers = Answers(served, FIRST if demo else None)
        answers.map()  # what can fail fails here, and the first page need not wait
        app, desk = application(answers, frozenset({f"{HOST}:{number}", f"localhost:{number}"}))
        address = f"http://{HOST}:{number}/"
        terminal().print(f"softdb explore: {address} (Ctrl-C ends it)", soft_wrap=True)
        if open_:
            import webbrowser

            webbrowser.open(address)
        try:
            uvicorn.Server(configured(app)).run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # that is how one ends it
        finally:
            desk.close()


def configured(app: Guard) -> uvicorn.Config:
    """How the page is served: plain HTTP/1.1, short requests that come in soon, nothing logged but errors."""
    import uvicorn

    from softdb.tools.explore.connection import Connection
    from softdb.tools.explore.guard import LONGEST

    return uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, lifespan="off", ws="none", http=Connection,
        proxy_headers=False, h11_max_incomplete_event_size=2 * LONGEST, timeout_graceful_shutdown=1,
    )  # fmt: skip


def _served(path: Path | None, encoder: str | None) -> Served:
    from softdb.tools.cli.served import Served

    if path is not None:
        return Served(path, encoder)
    from softdb.tools.explore.demo import demo_database

    return Served(None, db=demo_database())


def _listening(port: int | None) -> socket.socket:
    """A socket of this machine alone."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # said, so that asyncio sends the end of an answer at once
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, PORT if port is None else port))
        listener.listen()  # now, so that whoever reads the address can connect
    except OSError as error:
        if port is not None:
            listener.close()
            raise BadInput(f"port {port} cannot be had ({error.strerror}); give another, or leave --port out") from None
        listener.bind((HOST, 0))
        listener.listen()
    return listener
