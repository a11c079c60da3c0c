"""A database served to language models, by the Model Context Protocol (`softdb[mcp]`): read-only, on standard input."""
