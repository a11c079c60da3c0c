"""Programs on top of everything public: the command, the explorer, the MCP server, the benchmark, the demo.

Each imports its library when it is called. Begin in `cli/commands.py`, the list of commands.
"""
