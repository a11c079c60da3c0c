"""`softdb mcp`: a database as tools of a language model."""

from __future__ import annotations

from softdb.errors import MissingDependency
from softdb.tools.cli.arguments import Database, EncoderName

__all__ = ["mcp"]


def mcp(path: Database, encoder: EncoderName = None) -> None:
    """Serve a database to a language model, read-only, over standard input and output; a client starts this itself."""
    try:
        import mcp  # noqa: F401 - what the tools stand on
    except ImportError:
        raise MissingDependency("softdb mcp needs the MCP SDK; pip install 'softdb[mcp]'") from None
    from softdb.tools.mcp.tools import Tools

    with Tools(path, encoder) as tools:
        tools.server().run("stdio")
