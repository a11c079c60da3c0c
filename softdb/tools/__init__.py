"""Programs on top of the public API: the command line, the explorer, the MCP server, the benchmark, the demo.

Each program imports its libraries when it is called. Begin in `cli/commands.py`, the list of commands.
"""
