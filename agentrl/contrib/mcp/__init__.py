"""Tools of MCP servers, as `tools.mcp` of a config names them."""
