"""MCP: any client starts `knowgate mcp` and has its tools; here the SDK's own."""

import asyncio
import os
import sys

from knowgate.core.frameworks import require_for_script

require_for_script("mcp", extra="mcp")

from mcp import Client, StdioServerParameters

server = StdioServerParameters(command=sys.executable, args=["-m", "knowgate", "mcp"], env=dict(os.environ))


async def main():
    async with Client(server) as client:
        for question in sys.argv[1:]:
            made = (await client.call_tool("ask", {"question": question})).structured_content
            print(question, made["decision"]["retrieve"], made["answer"], sep=" | ")


asyncio.run(main())
