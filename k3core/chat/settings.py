"""What a conversation asks of the policy besides its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ThinkingEffort = Literal["low", "medium", "high", "max"]
THINKING_EFFORTS: tuple[ThinkingEffort, ...] = ("low", "medium", "high", "max")

ToolChoice = Literal["required", "none"]
TOOL_CHOICES: tuple[ToolChoice, ...] = ("required", "none")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """thinking: each assistant turn has a think channel before its response.

    tools: what the policy may call, as chat APIs write it: {"type": "function", "function": {"name": ..., ...}}.
    thinking_effort, tool_choice: None says nothing about it.
    response_format: "json_object", or the JSON schema that the response must match; None for free text.
    """

    thinking: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking_effort: ThinkingEffort | None = None
    tool_choice: ToolChoice | None = None
    response_format: Literal["json_object"] | Mapping[str, Any] | None = None


PLAIN = ChatSettings()
