"""A server of the Model Context Protocol for language models (`softdb[mcp]`): read-only, on standard input and output.

It queries the database by its public calls. Begin at `tools.Tools`; the command is `softdb.tools.cli.serve.mcp`.
"""
