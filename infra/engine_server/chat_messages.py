"""The chat API's messages <-> the project's."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from infra.engine_server.errors import ApiError
from k3core.chat.json_text import dump_arguments, load_json
from k3core.types import Message, ToolCall

_OF_A_POLICY = re.compile(r"functions\..+:[0-9]+", re.DOTALL)  # an id that a chat format itself writes


def read_messages(documents: Any, thinking: bool) -> list[Message]:
    """Raises ApiError 400 that names the message. Reasoning is dropped where the conversation has no think channel."""
    if not isinstance(documents, list) or not documents:
        raise ApiError(400, "messages: expected a list of at least one message")
    messages: list[Message] = []
    open_calls: list[tuple[str, int, str]] = []  # id, index and tool of those that are not answered yet
    for n, document in enumerate(documents):
        where = f"messages[{n}]"
        if not isinstance(document, dict):
            raise ApiError(400, f"{where}: expected an object")
        role, content = document.get("role"), _text(document.get("content"), f"{where}.content")
        match role:
            case "system" | "developer":
                messages.append(Message("system", content))
            case "user":
                messages.append(Message("user", content))
            case "assistant":
                calls = _read_calls(document.get("tool_calls") or [], f"{where}.tool_calls")
                reasoning = document.get("reasoning_content") if thinking else None
                thought = None if reasoning is None else _text(reasoning, f"{where}.reasoning_content")
                messages.append(Message("assistant", content, thought, tuple(call for _, call in calls)))
                open_calls = [(call_id, index, call.name) for index, (call_id, call) in enumerate(calls, start=1)]
            case "tool":
                answered = document.get("tool_call_id")
                found = next((call for call in open_calls if call[0] == answered), None)
                if found is None:
                    line = f"{where}.tool_call_id: {answered!r} answers no open call of the assistant's turn before it"
                    raise ApiError(400, line)
                open_calls.remove(found)
                messages.append(Message("tool", content, tool=found[2], index=found[1]))
            case _:
                known = "system, developer, user, assistant or tool"
                raise ApiError(400, f"{where}.role: {role!r} is none of {known}")
    return messages


def written_calls(calls: tuple[ToolCall, ...]) -> list[dict[str, Any]]:
    """A turn's calls as the API has them, with ids that no other turn has."""
    return [
        {
            "id": call.id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": _arguments_text(call)},
        }
        for call in calls
    ]


def _arguments_text(call: ToolCall) -> str:
    if call.arguments is not None:
        return dump_arguments(call.arguments)
    assert call.unparsed is not None, "ChatText lets no other call through"
    return call.unparsed


def _text(content: Any, where: str) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part(part, f"{where}[{n}]") for n, part in enumerate(content))
    raise ApiError(400, f"{where}: expected a string or a list of text parts")


def _part(part: Any, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind} if kind != "text":
            raise ApiError(400, f"{where}: type {kind!r} is not served: this model reads text")
    raise ApiError(400, f'{where}: expected {{"type": "text", "text": "..."}}')


def _read_calls(documents: Any, where: str) -> list[tuple[str, ToolCall]]:
    if not isinstance(documents, list):
        raise ApiError(400, f"{where}: expected a list")
    return [_read_call(document, f"{where}[{n}]") for n, document in enumerate(documents)]


def _read_call(document: Any, where: str) -> tuple[str, ToolCall]:
    match document:
        case {"id": str(call_id), "function": {"name": str(name), "arguments": str(arguments)}}:
            # Ids that this API made up never were in the policy's context.
            own_id = call_id if _OF_A_POLICY.fullmatch(call_id) else None
            try:
                parsed = load_json(arguments)
            except ValueError as error:
                return call_id, ToolCall(name, None, f"its arguments are not JSON: {error}", own_id, arguments)
            if not isinstance(parsed, Mapping):
                return call_id, ToolCall(name, None, "its arguments are no object", own_id, arguments)
            return call_id, ToolCall(name, parsed, id=own_id)
    raise ApiError(400, f'{where}: expected {{"id", "type": "function", "function": {{"name", "arguments"}}}}')
