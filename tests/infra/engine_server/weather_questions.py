"""A taskset of verifiers' with one question, and the program that asks it: a loop of chat turns with one tool.

verifiers finds both by the name of this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf
from engines import ANSWERED, ASKED, RESULT, TOOL

__all__ = ["WeatherHarness", "WeatherTaskset"]


class WeatherTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def says_what_it_was_taught(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == ANSWERED.content)


class WeatherTaskset(vf.Taskset[WeatherTask, vf.TasksetConfig]):
    def load(self) -> Iterable[WeatherTask]:
        yield WeatherTask(vf.TaskData(idx=0, prompt=ASKED.content), self.config.task)


class WeatherHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        del trace, runtime, mcp_urls  # it runs in this process, and its tool is its own
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(api_key=secret, base_url=endpoint, max_retries=0) as api:
            for _ in range(3):
                answer = await api.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                messages.append(message := answer.choices[0].message)
                calls = message.tool_calls or ()
                if not calls:
                    break
                messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT.content} for call in calls]
        return vf.ProgramResult(0, "", "")
