"""Episodes: an engine and an environment take turns until the environment, or a limit, says stop."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from k3core.chat import PLAIN, ChatFormat, ChatSettings, History, MalformedTurn, chat_format
from k3core.envs.environment import Environment, InfrastructureError, Limits
from k3core.rollout.protocol import Engine, GenerateRequest, Generation
from k3core.tokenizer import Tokenizer
from k3core.types import Message, Prompt, SamplingParams, StopReason, Supports, Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run: `sample` numbers the trajectories of a prompt."""

    prompt: Prompt
    sample: int
    seed: int


def trajectory_seed(*parts: object) -> int:
    """64 bits from what identifies a trajectory: run seed, step, prompt, sample."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


async def rollout(
    engine: Engine,
    environment: Environment,
    tokenizer: Tokenizer,
    specs: Sequence[EpisodeSpec],
    sampling: SamplingParams,
    limits: Limits,
    max_running: int,
    on_done: Callable[[Trajectory], None] = lambda _: None,
    settings: ChatSettings = PLAIN,
) -> list[Trajectory]:
    """Run all episodes, at most `max_running` at a time; a finished one leaves and a waiting one enters.

    The tokenizer decides the chat format; settings: what its prompts ask for, such as the tools that they declare.
    Returns the trajectories in the order of specs. A fault of the engine ends the rollout (the caller retries it) and
    is raised as it is; a fault of one episode's environment ends that episode only, as `infrastructure_error`.
    """
    places = asyncio.Semaphore(max_running)

    async def run(spec: EpisodeSpec) -> Trajectory:
        async with places:
            trajectory = await run_episode(engine, environment, tokenizer, spec, sampling, limits, settings)
        on_done(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(spec)) for spec in specs]
    except BaseExceptionGroup as faults:
        # The engine gives every episode the same fault; what ends the process comes before what ends the rollout.
        ending = [fault for fault in faults.exceptions if not isinstance(fault, Exception)]
        raise (ending or faults.exceptions)[0] from None
    return [task.result() for task in tasks]


async def run_episode(
    engine: Engine,
    environment: Environment,
    tokenizer: Tokenizer,
    spec: EpisodeSpec,
    sampling: SamplingParams,
    limits: Limits,
    settings: ChatSettings = PLAIN,
) -> Trajectory:
    """One trajectory. It depends on its seed and not on its neighbours; the clock can only end it (`timeout`).

    Raises ValueError for a prompt that leaves no room to answer below limits.max_tokens.
    """
    recorder = _Recorder()
    chat = chat_format(tokenizer)
    stub = chat.generation_stub(settings.thinking)
    recorder.history.append_context([*chat.render_messages(spec.prompt.messages, settings), *stub])
    if len(recorder.history) >= limits.max_tokens:
        raise ValueError(
            f"prompt {spec.prompt.id}: its {len(recorder.history)} tokens leave no room below max_tokens"
            f" {limits.max_tokens}: raise environment.max_tokens or shorten the prompt"
        )
    sequence = f"{spec.prompt.id}#{spec.sample}"
    deadline = time.monotonic() + limits.episode_timeout_s
    stop: StopReason | None = None
    error: str | None = None
    deliverables: dict[str, str] = {}
    num_tool_calls = 0
    try:
        with environment.start(spec.prompt) as episode:
            while stop is None:
                room = limits.max_tokens - len(recorder.history)
                turn_limit = min(sampling.max_tokens, limits.max_turn_tokens)
                turn_sampling = replace(sampling, max_tokens=min(turn_limit, room))
                request = GenerateRequest(
                    sequence, recorder.history.tokens, turn_sampling, spec.seed, num_drawn=recorder.num_drawn
                )
                generation = await engine.generate(request)
                recorder.append(generation)
                if generation.stop not in ("end_of_turn", "stop"):
                    is_turn_limit = generation.stop == "max_tokens" and turn_limit < room
                    stop = "max_turn_tokens" if is_turn_limit else "max_tokens"
                    break
                try:
                    turn, closing = _read_turn(chat, generation, settings.thinking)
                except MalformedTurn:
                    stop = "parse_error"
                    break
                if len(recorder.history) + len(closing) > limits.max_tokens:
                    stop = "max_tokens"
                    break
                recorder.history.append_context(closing)
                results, stop = episode.step(turn)
                if stop is None:
                    context = [*chat.render_tool_results(results, turn.tool_calls), *stub]
                    if time.monotonic() > deadline:
                        stop = "timeout"
                    elif len(recorder.history) + len(context) >= limits.max_tokens:
                        stop = "max_tokens"
                    else:  # what nobody will read is not appended
                        recorder.history.append_context(context)
            deliverables = episode.deliverables()
            num_tool_calls = episode.num_tool_calls
    except InfrastructureError as fault:
        stop, error = "infrastructure_error", str(fault)
    finally:
        engine.release(sequence)
    assert stop is not None
    return recorder.trajectory(spec, sampling, stop, num_tool_calls, deliverables, error)


def _read_turn(chat: ChatFormat, generation: Generation, thinking: bool) -> tuple[Message, list[int]]:
    """The turn, and the context that closes it: one that a stop of the sampling ended has not said its own end.

    Raises MalformedTurn for what is no turn even with an end.
    """
    closing = [chat.stop_token] if generation.stop == "stop" else []
    return chat.parse_turn([*generation.tokens_T.tolist(), *closing], thinking), closing


class _Recorder:
    """Token by token, what an episode was made of and where each piece came from."""

    def __init__(self) -> None:
        self.history = History()
        self.generations: list[tuple[int, Generation]] = []

    @property
    def num_drawn(self) -> int:
        return sum(len(generation.tokens_T) for _, generation in self.generations)

    def append(self, generation: Generation) -> None:
        self.generations.append((len(self.history), generation))
        self.history.append_sampled(generation.tokens_T.tolist())

    def trajectory(
        self,
        spec: EpisodeSpec,
        sampling: SamplingParams,
        stop: StopReason,
        num_tool_calls: int,
        deliverables: dict[str, str],
        error: str | None,
    ) -> Trajectory:
        T = len(self.history)
        logprobs_T, raw_logprobs_T = np.zeros(T, dtype=np.float32), np.zeros(T, dtype=np.float32)
        supports: list[np.ndarray | None] = [None] * T
        policy_step_T = np.full(T, -1, dtype=np.int32)
        routes_TLk = np.zeros((T, 0, 0), dtype=np.uint8)
        if self.generations:
            first = self.generations[0][1].routed_experts_TLk
            routes_TLk = np.full((T, *first.shape[1:]), np.iinfo(first.dtype).max, dtype=first.dtype)
        num_routed = 0
        # An engine may have nothing to say of these; half a record would be none.
        has_raw = all(len(g.raw_logprobs_T) == len(g.tokens_T) for _, g in self.generations)
        has_supports = all(len(g.supports) == len(g.tokens_T) for _, g in self.generations)
        for start, generation in self.generations:
            end = start + len(generation.tokens_T)
            logprobs_T[start:end] = generation.logprobs_T
            policy_step_T[start:end] = generation.policy_step_T
            if has_raw:
                raw_logprobs_T[start:end] = generation.raw_logprobs_T
            if has_supports:
                supports[start:end] = generation.supports
            # Those of earlier turns come again, perhaps from newer weights; what drew the next token is what counts.
            routes = generation.routed_experts_TLk
            routes_TLk[num_routed : len(routes)] = routes[num_routed:]
            num_routed = max(num_routed, len(routes))
        return Trajectory(
            prompt_id=spec.prompt.id,
            sample=spec.sample,
            seed=spec.seed,
            tokens_T=np.array(self.history.tokens, dtype=np.int32),
            loss_mask_T=np.array(self.history.loss_mask, dtype=bool),
            rollout_logprobs_T=logprobs_T,
            routed_experts_TLk=routes_TLk,
            policy_step_T=policy_step_T,
            sampling=sampling,
            stop_reason=stop,
            num_turns=len(self.generations),
            num_tool_calls=num_tool_calls,
            routed_layers=self.generations[0][1].routed_layers if self.generations else (),
            deliverables=deliverables,
            error=error,
            raw_logprobs_T=raw_logprobs_T if has_raw else None,
            supports=Supports.of_rows(supports) if has_supports else None,
        )
