"""A server with a tool, by the package mcp. Run by scripts/check_mcp.sh."""

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2
    from mcp.server.mcpserver import MCPServer as FastMCP

server = FastMCP("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


server.run()
