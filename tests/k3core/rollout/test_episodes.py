"""Episodes with a scripted engine in the real environment: why they end, what they keep, what they leave behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from torch import Tensor

from k3core.chat import generation_stub, parse_turn, render_messages, render_tool_results, render_turn, training_texts
from k3core.envs.contracts import MEMO, ContractsEnvironment, ContractsEpisode, format_memo, generate
from k3core.envs.demonstrations import demonstrate
from k3core.envs.environment import InfrastructureError, Limits
from k3core.model.config import K3Config
from k3core.model.model import K3Model
from k3core.model.weights import named_tensors
from k3core.rollout.engine import K3Engine
from k3core.rollout.episodes import EpisodeSpec, rollout, run_episode, trajectory_seed
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.tokenizer import Tokenizer
from k3core.types import Message, Prompt, SamplingParams, ToolCall, Trajectory

Ids = list[int]
Script = Sequence[Ids | Exception]
RandomModel = Callable[[K3Config], K3Model]

LIMITS = Limits(max_tokens=600)
PROMPT = generate(0, 0, "train")
GREP = ToolCall("grep", {"pattern": "payment"})
FINISH = ToolCall("finish", {})


@dataclass
class ScriptedEngine:
    """Says what each sequence's script says, turn by turn. Its routes and logprobs tell the position of their token."""

    scripts: Mapping[str, Script]
    end_of_turn: int
    policy_step: int = 7
    requests: list[GenerateRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _turn: dict[str, int] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)

    def load(self, step: int, _tensors: Mapping[str, Tensor]) -> None:
        self.policy_step = step

    async def generate(self, request: GenerateRequest) -> Generation:
        name = request.sequence
        self.requests.append(request)
        self._open.add(name)
        self.most_at_once = max(self.most_at_once, len(self._open))
        await asyncio.sleep(0.001)
        turn = self._turn[name] = self._turn.get(name, -1) + 1
        said = self.scripts[name][turn]
        if isinstance(said, Exception):
            raise said
        tokens = said[: request.sampling.max_tokens]
        start = len(request.tokens)
        return Generation(
            tokens_T=np.array(tokens, dtype=np.int32),
            logprobs_T=-np.arange(start, start + len(tokens), dtype=np.float32),
            policy_step_T=np.full(len(tokens), self.policy_step, dtype=np.int32),
            raw_logprobs_T=-0.5 - np.arange(start, start + len(tokens), dtype=np.float32),
            supports=(None,) * len(tokens),
            num_cached=0,
            routed_experts_TLk=np.arange(start + len(tokens) - 1, dtype=np.uint16).reshape(-1, 1, 1),
            routed_layers=("layers.1.block_sparse_moe",),
            stop="end_of_turn" if tokens[-1] == self.end_of_turn else "max_tokens",
        )

    def release(self, sequence: str) -> None:
        self.released.append(sequence)
        self._open.discard(sequence)


class BrokenEnvironment(ContractsEnvironment):
    """Its disk fails in the second turn of some prompts."""

    def __init__(self, broken: frozenset[str]) -> None:
        super().__init__(LIMITS)
        self.broken = broken

    def start(self, prompt: Prompt) -> ContractsEpisode:
        return BrokenEpisode(prompt, LIMITS) if prompt.id in self.broken else super().start(prompt)


class BrokenEpisode(ContractsEpisode):
    def step(self, turn: Message) -> tuple[tuple[Message, ...], None]:
        results, _ = super().step(turn)
        if self._num_turns == 2:
            raise InfrastructureError("disk full")
        return results, None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    prompts = [generate(0, n, "warm") for n in range(60)]
    conversations = [demonstrate(prompt, "expert", random.Random(n)) for n, prompt in enumerate(prompts)]
    return Tokenizer.train((text for messages in conversations for text in training_texts(messages)), 450)


@pytest.fixture
def say(tokenizer: Tokenizer) -> Callable[..., Ids]:
    def ids_of(*calls: ToolCall, content: str = "") -> Ids:
        return render_turn(Message("assistant", content, tool_calls=calls), tokenizer, thinking=False)

    return ids_of


def write_memo(prompt: Prompt) -> ToolCall:
    return ToolCall("write", {"path": MEMO, "content": format_memo(prompt.hidden["answer"])})


def play(
    tokenizer: Tokenizer,
    script: Script,
    limits: Limits = LIMITS,
    sampling: SamplingParams = SamplingParams(max_tokens=500),  # noqa: B008 - frozen
    environment: ContractsEnvironment | None = None,
) -> tuple[Trajectory, ScriptedEngine]:
    """One episode; whatever happens, its sequence is released once."""
    engine = ScriptedEngine({f"{PROMPT.id}#3": script}, tokenizer.end_of_msg)
    spec = EpisodeSpec(PROMPT, 3, seed=11)
    environment = environment or ContractsEnvironment(limits)
    try:
        trajectory = asyncio.run(run_episode(engine, environment, tokenizer, spec, sampling, limits))
    finally:
        assert engine.released == [f"{PROMPT.id}#3"]
    return trajectory, engine


def context_of(tokenizer: Tokenizer) -> Ids:
    return [*render_messages(PROMPT.messages, tokenizer), *generation_stub(tokenizer, thinking=False)]


def sampled_of(trajectory: Trajectory) -> Ids:
    return trajectory.tokens_T[trajectory.loss_mask_T].tolist()


# Why episodes end


def test_an_episode_that_finishes_is_its_conversation_token_by_token(
    tokenizer: Tokenizer, say: Callable[..., Ids]
) -> None:
    last = (write_memo(PROMPT), FINISH)
    turns = [say(GREP), say(*last)]
    trajectory, engine = play(tokenizer, turns, replace(LIMITS, max_turn_tokens=500))
    with ContractsEnvironment(LIMITS).start(PROMPT) as episode:
        results, _ = episode.step(Message("assistant", tool_calls=(GREP,)))
    conversation = [
        *PROMPT.messages,
        Message("assistant", tool_calls=(GREP,)),
        *results,
        Message("assistant", tool_calls=last),
    ]
    assert trajectory.tokens_T.tolist() == render_messages(conversation, tokenizer)
    assert sampled_of(trajectory) == [*turns[0], *turns[1]]
    assert trajectory.stop_reason == "finished"
    assert (trajectory.num_turns, trajectory.num_tool_calls) == (2, 3)
    assert trajectory.deliverables == {MEMO: format_memo(PROMPT.hidden["answer"])}
    assert (trajectory.prompt_id, trajectory.sample, trajectory.seed, trajectory.error) == (PROMPT.id, 3, 11, None)
    assert [request.seed for request in engine.requests] == [11, 11]


def test_a_turn_without_a_call_ends_the_episode(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    trajectory, _ = play(tokenizer, [say(content="I am done.")])
    assert trajectory.stop_reason == "no_tool_call"
    assert trajectory.tokens_T.tolist() == [*context_of(tokenizer), *say(content="I am done.")]


def test_a_malformed_turn_ends_the_episode_and_stays_as_it_was_sampled(
    tokenizer: Tokenizer, say: Callable[..., Ids]
) -> None:
    malformed = [tokenizer.close, *say(GREP)]
    trajectory, _ = play(tokenizer, [say(GREP), malformed])
    assert trajectory.stop_reason == "parse_error"
    assert sampled_of(trajectory) == [*say(GREP), *malformed]
    assert trajectory.num_turns == 2


def test_the_environments_turn_limit_ends_the_episode(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    limits = replace(LIMITS, max_turns=2)
    trajectory, _ = play(tokenizer, [say(GREP), say(GREP)], limits)
    assert trajectory.stop_reason == "max_turns"
    assert trajectory.num_turns == 2


@pytest.mark.parametrize(("of_sampling", "of_limits"), [(6, 500), (500, 6)])
def test_a_turn_that_does_not_end_in_its_limit_ends_the_episode(
    tokenizer: Tokenizer, say: Callable[..., Ids], of_sampling: int, of_limits: int
) -> None:
    limits = replace(LIMITS, max_turn_tokens=of_limits)
    trajectory, engine = play(tokenizer, [say(GREP)], limits, SamplingParams(max_tokens=of_sampling))
    assert trajectory.stop_reason == "max_turn_tokens"
    assert sampled_of(trajectory) == say(GREP)[:6]
    assert engine.requests[0].sampling.max_tokens == 6


def test_a_history_that_reaches_its_limit_inside_a_turn_ends_the_episode(
    tokenizer: Tokenizer, say: Callable[..., Ids]
) -> None:
    limits = replace(LIMITS, max_tokens=len(context_of(tokenizer)) + 5)
    trajectory, _ = play(tokenizer, [say(GREP)], limits)
    assert trajectory.stop_reason == "max_tokens"
    assert len(trajectory.tokens_T) == limits.max_tokens


def test_results_that_leave_no_room_for_a_turn_are_not_appended(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    with ContractsEnvironment(LIMITS).start(PROMPT) as episode:
        results, _ = episode.step(Message("assistant", tool_calls=(GREP,)))
    history = [*context_of(tokenizer), *say(GREP)]
    needed = len(history) + len(render_tool_results(results, tokenizer)) + len(generation_stub(tokenizer, False)) + 1
    trajectory, engine = play(tokenizer, [say(GREP), say(FINISH)], replace(LIMITS, max_tokens=needed - 1))
    assert trajectory.stop_reason == "max_tokens"
    assert trajectory.tokens_T.tolist() == history
    assert len(engine.requests) == 1

    trajectory, engine = play(tokenizer, [say(GREP), say(FINISH)], replace(LIMITS, max_tokens=needed))
    assert trajectory.stop_reason == "max_tokens"
    assert len(trajectory.tokens_T) == needed
    assert engine.requests[1].sampling.max_tokens == 1


def test_the_clock_ends_an_episode_between_turns(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    trajectory, _ = play(tokenizer, [say(GREP), say(FINISH)], replace(LIMITS, episode_timeout_s=1e-6))
    assert trajectory.stop_reason == "timeout"
    assert trajectory.tokens_T.tolist() == [*context_of(tokenizer), *say(GREP)]


def test_a_turn_that_finishes_late_is_finished(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    trajectory, _ = play(tokenizer, [say(FINISH)], replace(LIMITS, episode_timeout_s=1e-6))
    assert trajectory.stop_reason == "finished"


def test_a_fault_of_the_environment_is_no_fault_of_the_policy(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    environment = BrokenEnvironment(frozenset({PROMPT.id}))
    trajectory, _ = play(tokenizer, [say(GREP), say(GREP)], environment=environment)
    assert (trajectory.stop_reason, trajectory.error) == ("infrastructure_error", "disk full")
    assert trajectory.deliverables == {}
    assert sampled_of(trajectory) == say(GREP) * 2


def test_a_prompt_without_room_for_an_answer_is_refused(tokenizer: Tokenizer) -> None:
    length = len(context_of(tokenizer))
    with pytest.raises(ValueError, match=rf"prompt {PROMPT.id}: its {length} tokens .* raise environment\.max_tokens"):
        asyncio.run(
            run_episode(
                ScriptedEngine({}, tokenizer.end_of_msg),
                ContractsEnvironment(LIMITS),
                tokenizer,
                EpisodeSpec(PROMPT, 0, 0),
                SamplingParams(),
                replace(LIMITS, max_tokens=length),
            )
        )


# What they keep


def test_every_array_tells_of_its_own_token(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    trajectory, _ = play(tokenizer, [say(GREP), say(GREP), say(FINISH)])
    T, mask_T = len(trajectory.tokens_T), trajectory.loss_mask_T
    assert np.array_equal(trajectory.rollout_logprobs_T, np.where(mask_T, -np.arange(T), 0))
    assert np.array_equal(trajectory.policy_step_T, np.where(mask_T, 7, -1))
    assert trajectory.routed_experts_TLk[:, 0, 0].tolist() == [*range(T - 1), 65535]
    assert trajectory.sampling == SamplingParams(max_tokens=500)


def test_sampled_ids_are_kept_however_they_are_spelled(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    """BPE is no bijection: a policy may spell a word by its characters, and those are the ids to train on."""
    rng = random.Random(0)

    def respelled(ids: Ids) -> Ids:
        spelled: Ids = []
        for token in ids:
            if tokenizer.is_control(token) or rng.random() < 0.5:
                spelled.append(token)
            else:
                spelled += [i for character in tokenizer.decode([token]) for i in tokenizer.encode_text(character)]
        return spelled

    limits = Limits(max_tokens=3000, max_turn_tokens=1000)
    for _ in range(40):
        canonical = [*[say(GREP)] * rng.randint(0, 3), say(write_memo(PROMPT), FINISH)]
        turns = [respelled(turn) for turn in canonical]
        assert turns[-1] != canonical[-1]
        trajectory, _ = play(tokenizer, turns, limits, SamplingParams(max_tokens=1000))
        assert trajectory.stop_reason == "finished"
        assert trajectory.deliverables == {MEMO: format_memo(PROMPT.hidden["answer"])}
        tokens, starts = trajectory.tokens_T.tolist(), np.flatnonzero(np.diff(trajectory.loss_mask_T, prepend=False))
        spans = [tokens[start:end] for start, end in zip(starts[::2], [*starts[1::2], len(tokens)], strict=False)]
        assert spans == turns
        assert [parse_turn(span, tokenizer, False) for span in spans] == [
            parse_turn(t, tokenizer, False) for t in canonical
        ]


def test_a_rollout_of_the_real_engine_covers_every_token(
    k3: K3Config, random_model: RandomModel, tokenizer: Tokenizer
) -> None:
    cfg = replace(k3, vocab_size=tokenizer.vocab_size)
    engine = K3Engine(cfg, tokenizer.end_of_msg, 32, LIMITS.max_tokens)
    engine.load(2, named_tensors(random_model(cfg)))
    specs = [EpisodeSpec(PROMPT, sample, trajectory_seed(0, sample)) for sample in range(4)]
    limits = replace(LIMITS, max_turn_tokens=10)
    trajectories = asyncio.run(
        rollout(engine, ContractsEnvironment(limits), tokenizer, specs, SamplingParams(), limits, max_running=4)
    )
    assert len({tuple(t.tokens_T.tolist()) for t in trajectories}) == 4
    for t in trajectories:
        T = len(t.tokens_T)
        assert t.loss_mask_T.tolist() == [False] * len(context_of(tokenizer)) + [True] * (
            T - len(context_of(tokenizer))
        )
        assert t.routed_experts_TLk.shape == (T, len(cfg.moe_layers), cfg.num_experts_per_token)
        assert ((t.routed_experts_TLk == 255).all((1, 2)) == (np.arange(T) == T - 1)).all()
        assert (t.rollout_logprobs_T[t.loss_mask_T] < 0).all()
        assert set(t.policy_step_T[t.loss_mask_T].tolist()) == {2}
    engine.load(3, engine.served_tensors())  # every sequence was released


class Terminated(BaseException):
    """What ends the process, as a signal's handler raises it."""


def test_what_ends_the_process_comes_out_of_a_rollout_before_any_fault(tokenizer: Tokenizer) -> None:
    """The turns of an engine end with it; an episode beside them may have had a fault of its own."""

    class Ending(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            if request.seed == 0:
                raise RuntimeError("a fault")
            raise Terminated

    prompts = [generate(0, n, "train") for n in range(3)]
    specs = [EpisodeSpec(prompt, 0, n) for n, prompt in enumerate(prompts)]
    engine = Ending({f"{prompt.id}#0": [] for prompt in prompts}, tokenizer.end_of_msg)
    with pytest.raises(Terminated):
        asyncio.run(
            rollout(engine, ContractsEnvironment(LIMITS), tokenizer, specs, SamplingParams(), LIMITS, max_running=3)
        )


# Many of them


def run_many(
    tokenizer: Tokenizer,
    scripts: Mapping[int, Script],
    environment: ContractsEnvironment | None = None,
    max_running: int = 100,
) -> tuple[list[Trajectory] | BaseException, ScriptedEngine, list[str]]:
    """Prompt n plays script n; returns what came of it, the engine, and the prompts in the order they were done."""
    prompts = {n: generate(0, n, "train") for n in scripts}
    engine = ScriptedEngine({f"{prompts[n].id}#0": script for n, script in scripts.items()}, tokenizer.end_of_msg)
    done: list[str] = []
    coroutine = rollout(
        engine,
        environment or ContractsEnvironment(LIMITS),
        tokenizer,
        [EpisodeSpec(prompt, 0, n) for n, prompt in prompts.items()],
        SamplingParams(),
        LIMITS,
        max_running,
        lambda trajectory: done.append(trajectory.prompt_id),
    )
    try:
        return asyncio.run(coroutine), engine, done
    except Exception as fault:
        return fault, engine, done


def test_trajectories_come_in_the_order_of_their_specs_and_few_run_at_once(
    tokenizer: Tokenizer, say: Callable[..., Ids]
) -> None:
    scripts = {n: [say(GREP)] * (3 - n % 3) + [say(FINISH)] for n in range(8)}
    trajectories, engine, done = run_many(tokenizer, scripts, max_running=3)
    assert isinstance(trajectories, list)
    ids = [generate(0, n, "train").id for n in range(8)]
    assert [t.prompt_id for t in trajectories] == ids
    assert sorted(done) == ids != done
    assert engine.most_at_once == 3
    assert sorted(engine.released) == [f"{i}#0" for i in ids]


def test_an_infrastructure_error_ends_its_own_episode_only(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    broken = generate(0, 1, "train").id
    scripts = {n: [say(GREP), say(GREP), say(FINISH)] for n in range(3)}
    trajectories, engine, _ = run_many(tokenizer, scripts, BrokenEnvironment(frozenset({broken})))
    assert isinstance(trajectories, list)
    assert [t.stop_reason for t in trajectories] == ["finished", "infrastructure_error", "finished"]
    assert len(engine.released) == 3


@pytest.mark.parametrize("fault", [RuntimeError("engine died"), FloatingPointError("the logits are not finite")])
def test_a_fault_of_the_engine_ends_the_rollout_as_itself_and_releases_everything(
    tokenizer: Tokenizer, say: Callable[..., Ids], fault: Exception
) -> None:
    scripts: dict[int, Script] = {n: [say(GREP)] * 3 + [say(FINISH)] for n in range(4)}
    scripts[2] = [say(GREP), fault]
    result, engine, done = run_many(tokenizer, scripts)
    assert result is fault
    assert done == []
    assert len(set(engine.released)) == len(engine.released) == 4


def test_a_cancelled_rollout_releases_everything(tokenizer: Tokenizer, say: Callable[..., Ids]) -> None:
    engine = ScriptedEngine({f"{PROMPT.id}#{n}": [say(GREP)] * 500 for n in range(3)}, tokenizer.end_of_msg)
    specs = [EpisodeSpec(PROMPT, sample, sample) for sample in range(3)]
    limits = Limits(max_turns=600, max_tokens=10**6)

    async def run() -> None:
        coroutine = rollout(engine, ContractsEnvironment(limits), tokenizer, specs, SamplingParams(), limits, 9)
        async with asyncio.timeout(0.05):
            await coroutine

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert sorted(engine.released) == [f"{PROMPT.id}#{n}" for n in range(3)]


def test_seeds_of_trajectories_are_distinct_and_the_same_everywhere() -> None:
    seeds = {
        trajectory_seed(run, step, attempt, f"contracts/train-{run}-{prompt:06d}", sample)
        for run in range(3)
        for step in range(4)
        for attempt in range(2)
        for prompt in range(20)
        for sample in range(12)
    }
    assert len(seeds) == 3 * 4 * 2 * 20 * 12
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert trajectory_seed(0, 1, "a", 2) == 375888814450559874
