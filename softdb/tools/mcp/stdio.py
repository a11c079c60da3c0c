"""The server on standard input and output. A line that is no message is answered too, else its sender would wait."""

from __future__ import annotations

import json
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError
from pydantic import ValidationError


class Server(MCPServer[Any]):
    """The SDK's server, which by itself drops a line that it cannot parse without a word."""

    async def run_stdio_async(self) -> None:
        """Answer until the input ends."""
        send, receive = anyio.create_memory_object_stream[Any](0)
        inner = self._lowlevel_server
        async with stdio_server() as (messages, replies), anyio.create_task_group() as group:
            group.start_soon(_pass_on, messages, send, replies)
            await inner.run(receive, replies, inner.create_initialization_options())


async def _pass_on(messages: Any, send: MemoryObjectSendStream[Any], replies: Any) -> None:
    async with send:
        async for message in messages:
            if isinstance(message, Exception):
                await replies.send(SessionMessage(_refusal(message)))
            else:
                await send.send(message)


def _refusal(error: Exception) -> JSONRPCError:
    """The error of a line that is no JSON or no message, under the line's id where that can be read."""
    parts: list[Any] = list(error.errors()) if isinstance(error, ValidationError) else []
    whole = next((one["input"] for one in parts if one["type"] in ("json_invalid", "missing")), None)
    code, message = INVALID_REQUEST, "this is no message of JSON-RPC 2.0; send a request with jsonrpc, id and method"
    if isinstance(whole, str):
        code, message = PARSE_ERROR, "the line is not JSON in UTF-8, or holds half of a surrogate pair; send it again"
        try:
            whole = json.loads(whole)
        except (ValueError, RecursionError):
            whole = None
    name = whole.get("id") if isinstance(whole, dict) else None
    known = type(name) is int or (isinstance(name, str) and name.isprintable())  # half a pair cannot be sent back
    return JSONRPCError(jsonrpc="2.0", id=name if known else None, error=ErrorData(code=code, message=message))
