"""What an environment is to a rollout: prompts in, tool messages out, files to grade at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Protocol, Self

from k3core.types import Message, Prompt, StopReason


class InfrastructureError(Exception):
    """A fault of ours (disk full, workspace gone), never of the policy: the episode must not be graded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one episode.

    max_turns: assistant turns; max_turn_tokens and max_tokens: sampled tokens of one turn and length of the whole
    history, both enforced by the rollout; max_output_bytes: UTF-8 bytes of one tool result.
    """

    max_turns: int = 6
    max_turn_tokens: int = 96
    max_tokens: int = 512
    max_output_bytes: int = 1500
    tool_timeout_s: float = 2.0
    max_calls_per_turn: int = 4
    episode_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"limits.{field.name}: must be positive, not {getattr(self, field.name)}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the policy sees it; `parameters` is the JSON schema of an OpenAI function."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def declaration(self) -> dict[str, Any]:
        """As chat APIs write it, and as `ChatSettings.tools` takes it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Episode(Protocol):
    """One prompt being worked on. A context manager: leaving it closes it."""

    @property
    def num_tool_calls(self) -> int:
        """Calls made so far, failed ones included. Reported, never rewarded."""

    def step(self, turn: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """Run an assistant turn's calls in order; a tool message each, and why the episode ended or None.

        Calls after one that ended the episode are not run. Raises InfrastructureError.
        """

    def deliverables(self) -> dict[str, str]:
        """Text of the files that the rubric grades, by name; a missing or unreadable one is absent.

        Raises InfrastructureError.
        """

    def close(self) -> None:
        """Remove the working directory. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Environment(Protocol):
    @property
    def name(self) -> str:
        """The value of `Prompt.environment` that this environment takes."""

    @property
    def sha256(self) -> str:
        """Digest of everything but the prompt that shapes an episode."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...

    def start(self, prompt: Prompt) -> Episode:
        """Raises InfrastructureError when the working directory cannot be made."""
