"""Programs on top of everything public: the command, the explorer, the MCP server, the benchmark, the demo."""
