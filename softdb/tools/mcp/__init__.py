"""A database served to language models, by the Model Context Protocol (`softdb[mcp]`): read-only, on standard input.

It asks by the public calls. Begin at `tools.Tools`; the command is `softdb.tools.cli.serve.mcp`.
"""
