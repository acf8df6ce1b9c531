"""The sentences of XTML's own system messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3core.chat.json_text import dump_schema
from k3core.chat.settings import ThinkingEffort, ToolChoice


@dataclass(frozen=True, slots=True)
class Wording:
    """Texts around what a setting says. The defaults are this project's; the grammar fixes only where they stand.

    A policy trained on other sentences may get those: `Xtml(Wording(tools=..., ...))`. tools and json_schema are
    followed by a fenced block of JSON; `{effort}` in thinking_effort is the effort.
    """

    tools: str = "# Tools\n\nThese are the tools that you may call, as JSON.\n\n"
    thinking_effort: str = (
        "How much to think before the response: `thinking_effort={effort}` of low, medium, high, max."
    )
    tool_required: str = "The next message must call a tool: `tool_choice=required`."
    tool_none: str = "The next message must not call a tool: `tool_choice=none`."
    json_object: str = "Respond with JSON alone, not in a code block: `response_format=json_object`."
    json_schema: str = (
        "Respond with JSON alone, not in a code block, that matches this schema: `response_format=json_schema`.\n"
    )

    def of_tools(self, tools: tuple[Mapping[str, Any], ...]) -> str:
        return self.tools + _fenced(list(tools))

    def of_thinking_effort(self, effort: ThinkingEffort) -> str:
        return self.thinking_effort.replace("{effort}", effort)

    def of_tool_choice(self, choice: ToolChoice) -> str:
        return {"required": self.tool_required, "none": self.tool_none}[choice]

    def of_response_format(self, wanted: str | Mapping[str, Any]) -> str:
        return self.json_object if isinstance(wanted, str) else self.json_schema + _fenced(wanted)


def _fenced(value: Any) -> str:
    return f"```json\n{dump_schema(value)}\n```"
