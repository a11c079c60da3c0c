"""Serve on standard input and output; answer a line that is no message with an error, so that no client waits."""

from __future__ import annotations

import json
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, Tool
from pydantic import ValidationError

from softdb.check import shown
from softdb.terminal import dumps, shortened


class Server(MCPServer[Any]):
    """The SDK's server; it answers lines that cannot be parsed with an error, where the SDK's own drops them."""

    async def list_tools(self) -> list[Tool]:
        """List the tools; their schemas allow no other arguments."""
        tools = await super().list_tools()
        for tool in tools:
            tool.input_schema["additionalProperties"] = False
        return tools

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool. Raises ToolError in one line for bad arguments, also for unknown ones, which the SDK ignores."""
        for tool in await self.list_tools():
            known = tool.input_schema["properties"]
            if tool.name == name and (unknown := [argument for argument in arguments if argument not in known]):
                takes = ", ".join(known) or "no arguments"
                raise ToolError(f"{name} has no argument {', '.join(map(shown, unknown))}; it takes {takes}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError(_problem(name, error.__cause__.errors())) from None
            raise

    async def run_stdio_async(self) -> None:
        """Answer messages until the input ends."""
        send, receive = anyio.create_memory_object_stream[Any](0)
        inner = self._lowlevel_server
        async with stdio_server() as (messages, replies), anyio.create_task_group() as group:
            group.start_soon(_pass_on, messages, send, replies)
            await inner.run(receive, replies, inner.create_initialization_options())


def _problem(name: str, details: list[Any]) -> str:
    """Return the first problem of the arguments in one line: "search: k is 0; expected greater than or equal to 1"."""
    argument, *index = place = details[0]["loc"][:2]
    same = [detail["msg"] for detail in details if detail["loc"][:2] == place]  # one for each type that is allowed
    expected = " or ".join(same).replace("or Input should be", "or").replace("Input should be", "expected")
    element = "".join(f"[{number}]" for number in index if isinstance(number, int))
    return f"{name}: {argument}{element} is {shortened(dumps(details[0]['input']), 80)}; {expected}"


async def _pass_on(messages: Any, send: MemoryObjectSendStream[Any], replies: Any) -> None:
    async with send:
        async for message in messages:
            if isinstance(message, Exception):
                await replies.send(SessionMessage(_refusal(message)))
            else:
                await send.send(message)


def _refusal(error: Exception) -> JSONRPCError:
    """Return the error for a line that is not JSON or not a message, with the line's id if it is readable."""
    details: list[Any] = list(error.errors()) if isinstance(error, ValidationError) else []
    line = next((detail["input"] for detail in details if detail["type"] in ("json_invalid", "missing")), None)
    code, message = INVALID_REQUEST, "the line is not a message of JSON-RPC 2.0; expected jsonrpc, id and method"
    if isinstance(line, str):
        code, message = PARSE_ERROR, "the line is not JSON in UTF-8, or holds half of a surrogate pair; correct it"
        try:
            line = json.loads(line)
        except (ValueError, RecursionError):
            line = None
    id_ = line.get("id") if isinstance(line, dict) else None
    readable = type(id_) is int or (isinstance(id_, str) and id_.isprintable())  # as UTF-8 has no lone surrogates
    return JSONRPCError(jsonrpc="2.0", id=id_ if readable else None, error=ErrorData(code=code, message=message))
