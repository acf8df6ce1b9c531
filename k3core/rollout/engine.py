"""K3Engine: token ids of a history in, sampled tokens out, over our own model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import EXPERT_MATRICES, LoraConfig, attach_lora
from k3core.model.model import ROWS, K3Model, build_model
from k3core.model.state import Emit, SlotState
from k3core.model.weights import load_tensors, named_tensors
from k3core.rollout.adapters import AdapterSet
from k3core.rollout.cpu_runner import CpuRunner
from k3core.rollout.memory import EngineMemory, Lease, MemorySizes, stepped
from k3core.rollout.prefix_cache import CacheStats, Namespace
from k3core.rollout.protocol import GenerateRequest, Generation, SampledToken, Stop, UnknownAdapter, UpdateRule
from k3core.rollout.runner import Pieces, Runner
from k3core.rollout.sampling import sample, sequence_generator
from k3core.rollout.scheduling import Limits, Piece, Refused, Running, Waiting, admit, schedule
from k3core.rollout.stops import StopMatcher

if TYPE_CHECKING:
    from k3core.tokenizer import Tokenizer

RANK = 8  # on the CPU turns move into the first slots, a multiple of this: what lies between them is computed too
MAX_QUEUE = 1 << 16  # turns that wait; who faces clients bounds them earlier


class QueueFull(RuntimeError):
    """Too many turns wait."""


@dataclass(slots=True)
class _Turn:
    """history: the request's tokens and those drawn since. Tokens up to `target` are to be prefilled, the first `num_fed`
    have been inputs; max_new tokens may be drawn behind the target. emits: where the prefill is to leave checkpoints."""

    request: GenerateRequest
    arrival: int
    history: list[int]
    target: int
    max_new: int
    generator: np.random.Generator
    matcher: StopMatcher | None
    done: asyncio.Future[Generation]
    lease: Lease | None = None
    num_fed: int = 0
    num_cached: int = -1
    emits: set[int] = field(default_factory=set)
    drawn: list[SampledToken] = field(default_factory=list)
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Turns that get a token, and the logits that it is drawn from."""

    turns: list[_Turn]
    logits_NV: Tensor


class K3Engine:
    """Continuous batching over our model, with a prefix cache behind it.

    One loop per engine: each tick asks `schedule` who decodes and which pieces of prompts go along, runs them, draws, and
    yields to the event loop so that episodes can run tools and come again. A turn holds memory while it runs; when it
    ends its history stays in the tree, where the next turn, and every other history that begins alike, finds it.

    What a sequence gets, to the last bit, depends on its tokens and its seed: not on its neighbours, on what was cached,
    on the pieces of its prefill or on its place in the batch (docs/policy.md says where that was seen to hold).
    """

    def __init__(
        self,
        cfg: K3Config,
        stop_token: int,
        num_slots: int,
        max_length: int,
        max_batch_tokens: int = 4096,
        lora: LoraConfig | None = None,
        sizes: MemorySizes | None = None,
        tokenizer: Tokenizer | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_queue: int = MAX_QUEUE,
        is_invariant: bool = True,
    ) -> None:
        """tokenizer: what stop strings are found with. is_invariant: whether a GPU's products of matrices have one order
        for every batch (the CPU's always have). Raises ValueError for sizes under which a turn could wait for ever."""
        require_served(cfg, lora, torch.device(device))
        self.num_slots = -(-num_slots // ROWS) * ROWS
        self.model = build_model(cfg, dtype, device)
        if lora is not None:
            attach_lora(self.model, lora, torch.Generator())
        self.model.requires_grad_(False)
        self.adapter_set = AdapterSet(self.model)
        sizes = sizes or MemorySizes()
        self.memory = EngineMemory(cfg, self.num_slots, max_length, sizes, dtype, device)
        self.limits = Limits(
            max_batch_tokens=max(max_batch_tokens, self.num_slots + 15),
            num_slots=self.num_slots,
            page_size=sizes.page_size,
            total_pages=self.memory.cache_config.num_pages,
            max_length=max_length,
            max_queue=max_queue,
        )
        self.runner = _make_runner(self.model, self.memory.state, is_invariant)
        self.stop_token = stop_token
        self.max_length = max_length
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.num_preempted = 0
        self._step = -1
        self._base_sha256 = ""
        self._num_loads = 0
        self._num_arrivals = 0
        self._turns: dict[str, _Turn] = {}
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def policy_step(self) -> int:
        return self._step

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.adapter_set.names

    @property
    def stats(self) -> CacheStats:
        return self.memory.cache.stats

    # Weights

    def load(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        rule: UpdateRule = "drop",
        base_sha256: str | None = None,
    ) -> None:
        """Serve these weights from one token to the next. base_sha256: their digest; without it nothing that they
        computed is found again once others were loaded. Raises ValueError, and changes nothing, for weights that do not
        fit and for a `continue` that is not to a later step."""
        if rule == "continue" and step <= self._step:
            raise ValueError(f"continue: step {step} must come after {self._step}; use drop or keep")
        base = base_sha256 or f"load {self._num_loads + 1}"
        known = self.memory.cache.namespaces()
        moves = stepped([*known, *(_lease(turn).namespace for turn in self._running())], self._step, base, step)
        if rule == "continue" and not set(moves.values()).isdisjoint(known):
            raise ValueError(f"continue: step {step} has histories of its own, which were kept; use drop or keep")
        self.adapter_set.activate(None)  # the policy's own tensors are written, and no adapter's
        load_tensors(self.model, dict(tensors))
        self._num_loads += 1
        if rule != "continue":
            for turn in self._running():
                self._requeue(turn, keep=False)
        if (self._base_sha256, self._step) != (base, step):
            self.memory.update(rule, moves)
        self._base_sha256, self._step = base, step

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], config: LoraConfig) -> None:
        """As `Engine.load_adapter`; running turns of an older one of that name begin again from their tokens."""
        require_served(self.model.cfg, config, self.device)
        before = self.adapter_set.sha256(name) if name in self.adapters else None
        self.adapter_set.load(name, tensors, config)
        self.runner.forget(name)
        if before not in (None, self.adapter_set.sha256(name)):
            for turn in self._running():
                if turn.request.adapter == name:
                    self._requeue(turn, keep=False)

    def unload_adapter(self, name: str) -> None:
        self.adapter_set.unload(name)
        self.runner.forget(name)
        for turn in list(self._turns.values()):
            if turn.request.adapter == name:
                self._leave(turn)
                if not turn.done.done():
                    turn.done.set_exception(UnknownAdapter(f"adapter {name!r} was unloaded while the turn ran"))

    def served_tensors(self) -> dict[str, Tensor]:
        """The weights that it computes with, by checkpoint name."""
        self.adapter_set.activate(None)
        return named_tensors(self.model)

    # Turns

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises UnknownAdapter, QueueFull, and ValueError for what could never be answered."""
        turn = self._admit(request)
        self._turns[request.sequence] = turn
        self._wake()
        try:
            return await turn.done
        except asyncio.CancelledError:
            if self._turns.get(request.sequence) is turn:
                self._leave(turn)
            raise

    def release(self, sequence: str) -> None:
        turn = self._turns.get(sequence)
        if turn is not None:
            self._leave(turn)
            turn.done.cancel()

    def _admit(self, request: GenerateRequest) -> _Turn:
        name, sampling, num_tokens = request.sequence, request.sampling, len(request.tokens)
        assert self._step >= 0, "load weights first"
        assert name not in self._turns, f"{name}: its turn is not over"
        self.adapter_set.sha256(request.adapter)
        if num_tokens >= self.max_length:
            raise ValueError(f"history of {num_tokens} tokens leaves no room below max_length {self.max_length}")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"{name}: this engine has no tokenizer to find stop strings with: leave stop empty")
        max_new = min(sampling.max_tokens, self.max_length - num_tokens)
        waiting = Waiting(name, self._num_arrivals, num_tokens, max_new, request.priority)
        answer = admit(sum(turn.lease is None for turn in self._turns.values()), waiting, self.limits)
        if isinstance(answer, Refused):
            raise ValueError(f"{name}: {answer.reason}") if answer.retry_after_s is None else QueueFull(answer.reason)
        self._num_arrivals += 1
        return _Turn(
            request,
            waiting.arrival,
            list(request.tokens),
            num_tokens,
            max_new,
            sequence_generator(request.seed, request.num_drawn),
            StopMatcher(sampling.stop) if sampling.stop else None,
            asyncio.get_running_loop().create_future(),
        )

    def _leave(self, turn: _Turn) -> None:
        """What was computed of its history stays."""
        del self._turns[turn.request.sequence]
        if turn.lease is not None:
            self.memory.give_back(turn.lease, turn.history[: turn.num_fed])
            turn.lease = None

    def _requeue(self, turn: _Turn, keep: bool) -> None:
        """Out of the batch, to come again with all its tokens; keep: what was computed of them may be found then."""
        assert turn.lease is not None
        self.memory.give_back(turn.lease, turn.history[: turn.num_fed] if keep else ())
        turn.lease = None
        turn.max_new -= len(turn.history) - turn.target
        turn.target, turn.num_fed = len(turn.history), 0

    def _running(self) -> list[_Turn]:
        return [turn for turn in self._turns.values() if turn.lease is not None]

    # The loop

    def _wake(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._loop())

    async def _loop(self) -> None:
        """Runs while there are turns. A fault reaches every one of them."""
        try:
            while self._turns:
                self._tick()
                await asyncio.sleep(0)  # finished turns wake their episodes, which may ask again before the next tick
        except asyncio.CancelledError:
            self._fail(RuntimeError("the engine's loop was stopped"))
            raise
        except BaseException as fault:
            # What a signal's handler raises while the model runs, too: nobody awaits this task, so raised here it would
            # be lost, and the run that was told to stop would try the rollout again.
            self._fail(fault)
            if isinstance(fault, KeyboardInterrupt | SystemExit):  # these end the event loop
                raise

    def _fail(self, fault: BaseException) -> None:
        """Give the fault to every turn and forget all histories, whose tensors may stand between two positions."""
        turns = list(self._turns.values())
        self._turns.clear()
        for turn in turns:
            if turn.lease is not None:
                self.memory.give_back(turn.lease)
            if not turn.done.done():
                turn.done.set_exception(fault)
        self.memory.forget()

    @torch.no_grad()
    def _tick(self) -> None:
        running = [self._as_running(turn) for turn in self._running()]
        plan = schedule(self._candidates(), running, self.memory.free, self.limits)
        self.num_preempted += len(plan.preempted)
        for waiting in plan.preempted:
            self._requeue(self._turns[waiting.sequence], keep=True)
        for name in plan.grown:
            lease = self._turns[name].lease
            assert lease is not None
            self.memory.grow(lease)
        for admission in plan.admitted:
            self._take(self._turns[admission.sequence], admission.num_pages)
        drawings = [*self._prefill(plan.prefill), *self._decode([self._turns[name] for name in plan.decode])]
        if drawings:
            self._draw(drawings)

    def _as_running(self, turn: _Turn) -> Running:
        assert turn.lease is not None
        return Running(
            turn.request.sequence,
            turn.arrival,
            turn.target,
            turn.max_new,
            min(turn.num_fed, turn.target),
            len(turn.history) - turn.target,
            len(turn.lease.pages),
            turn.request.priority,
        )

    def _candidates(self) -> list[Waiting]:
        """The first of those that wait, as many as could be taken, with what the cache has of them.

        One whose next page another one is about to compute waits for that, which is told to leave a checkpoint where the
        two part.
        """
        waiting = sorted((t for t in self._turns.values() if t.lease is None), key=_rank)
        leaders = {self._next_page(turn, turn.num_fed): turn for turn in self._running() if turn.num_fed < turn.target}
        found: list[Waiting] = []
        for turn in waiting:
            if len(found) >= self.memory.free.slots:
                break
            num_cached = self.memory.cache.reach(self._namespace(turn), turn.history[: turn.target])
            page = self._next_page(turn, num_cached)
            leader = leaders.setdefault(page, turn) if page is not None else turn
            if leader is not turn:
                leader.emits.add(_num_shared(leader.history, turn.history) // self.memory.grid * self.memory.grid)
                continue
            name, priority = turn.request.sequence, turn.request.priority
            found.append(Waiting(name, turn.arrival, turn.target, turn.max_new, priority, num_cached))
        return found

    def _next_page(self, turn: _Turn, start: int) -> tuple[Namespace, tuple[int, ...]] | None:
        """What tells apart who computes what: the tokens up to the next grid position, if one is left behind it."""
        end = (start // self.memory.grid + 1) * self.memory.grid
        return (self._namespace(turn), tuple(turn.history[:end])) if end < turn.target else None

    def _namespace(self, turn: _Turn) -> Namespace:
        adapter = self.adapter_set.sha256(turn.request.adapter)
        tokenizer = "" if self.tokenizer is None else self.tokenizer.sha256
        return Namespace(self._base_sha256, adapter, self._step, tokenizer, turn.request.tenant)

    def _take(self, turn: _Turn, num_pages: int) -> None:
        tokens = turn.history[: turn.target]
        turn.lease, branch = self.memory.take(self._namespace(turn), tokens, num_pages)
        turn.num_fed = turn.lease.num_cached
        if turn.num_cached < 0:  # the first time; after a preemption the turn finds itself
            turn.num_cached = turn.num_fed
        grid = self.memory.grid
        # The first serves equal prompts, which leave a token to compute, the second the sequence's own next turn.
        turn.emits |= {(turn.target - 1) // grid * grid, turn.target // grid * grid, branch or 0}

    # Passes

    def _prefill(self, pieces: Sequence[Piece]) -> list[_Drawing]:
        """One pass for each adapter; those whose prompts are complete now draw."""
        ends = {piece.sequence: piece.end for piece in pieces}
        drawings: list[_Drawing] = []
        for adapter, group in _by_adapter(self._turns[name] for name in ends).items():
            taken = [(turn, turn.num_fed, ends[turn.request.sequence]) for turn in group]
            self.adapter_set.activate(adapter)
            pieces_of_group = Pieces(
                [token for turn, start, end in taken for token in turn.history[start:end]],
                [end - start for _, start, end in taken],
                [_lease(turn).slot for turn in group],
                [start for _, start, _ in taken],
                self._emits(taken),
                adapter,
            )
            forward = self.runner.prefill(pieces_of_group)
            routes_TLk = self._routes(forward.routed_experts_TLk)
            first, complete, rows = 0, [], []
            for turn, start, end in taken:
                self.memory.write_routes(_lease(turn), start, routes_TLk[first : first + end - start])
                first += end - start
                turn.num_fed = end
                if end == turn.target:
                    self.memory.share(_lease(turn), turn.history[:end])
                    complete.append(turn)
                    rows.append(first - 1)
            if complete:
                drawings.append(_Drawing(complete, self.runner.logits(forward.hidden_TD[rows])))
        return drawings

    def _emits(self, taken: Sequence[tuple[_Turn, int, int]]) -> list[Emit]:
        emits: list[Emit] = []
        for n, (turn, start, end) in enumerate(taken):
            for position in sorted(at for at in turn.emits if start < at <= end):
                checkpoint = self.memory.lend_checkpoint(_lease(turn), position)
                if checkpoint is not None:
                    emits.append(Emit(n, position, checkpoint))
        return emits

    def _decode(self, turns: Sequence[_Turn]) -> list[_Drawing]:
        """One token for each, in one pass for each adapter."""
        if self.device.type == "cpu":
            self.memory.close_ranks(-(-len(self._running()) // RANK) * RANK)
        drawings: list[_Drawing] = []
        for adapter, group in _by_adapter(turns).items():
            self.adapter_set.activate(adapter)
            logits_NV, routes = self.runner.decode(
                [turn.history[turn.num_fed] for turn in group],
                [_lease(turn).slot for turn in group],
                [turn.num_fed for turn in group],
                adapter,
            )
            positions = [turn.num_fed for turn in group]
            self.memory.write_step_routes([_lease(turn) for turn in group], positions, self._routes(routes))
            for turn in group:
                turn.num_fed += 1
                if turn.num_fed % self.memory.grid == 0:
                    self.memory.roll_checkpoint(_lease(turn), turn.num_fed)
            drawings.append(_Drawing(group, logits_NV))
        return drawings

    def _routes(self, routes_TLk: Tensor) -> np.ndarray:
        return routes_TLk.cpu().numpy().astype(self.memory.route_dtype)

    def _draw(self, drawings: Sequence[_Drawing]) -> None:
        """The next token of each turn from its row."""
        turns = [turn for drawing in drawings for turn in drawing.turns]
        logits_NV = torch.cat([drawing.logits_NV for drawing in drawings])
        if not torch.isfinite(torch.stack(logits_NV.aminmax())).all():
            raise FloatingPointError(f"the logits of step {self._step} are not finite")
        draws = sample(logits_NV, [turn.request.sampling for turn in turns], [t.generator.random() for t in turns])
        columns = (draws.tokens_N.tolist(), draws.logprobs_N.tolist(), draws.raw_logprobs_N.tolist(), draws.supports)
        for turn, token, logprob, raw_logprob, support in zip(turns, *columns, strict=True):
            drawn = SampledToken(token, logprob, raw_logprob, self._step, support)
            turn.history.append(token)
            turn.drawn.append(drawn)
            if turn.request.on_token is not None:
                turn.request.on_token(drawn)
            self._finish_if_done(turn)

    def _finish_if_done(self, turn: _Turn) -> None:
        token = turn.history[-1]
        stop: Stop
        if token == self.stop_token:
            stop = "end_of_turn"
        elif self._is_stopped(turn, token):
            stop = "stop"
        elif len(turn.drawn) >= turn.request.sampling.max_tokens:
            stop = "max_tokens"
        elif len(turn.history) >= self.max_length:
            stop = "max_length"
        else:
            return
        drawn = turn.drawn
        routes_TLk = self.memory.read_routes(_lease(turn), turn.num_fed)
        self._leave(turn)
        generation = Generation(
            tokens_T=np.array([each.token for each in drawn], dtype=np.int32),
            logprobs_T=np.array([each.logprob for each in drawn], dtype=np.float32),
            raw_logprobs_T=np.array([each.raw_logprob for each in drawn], dtype=np.float32),
            policy_step_T=np.array([each.policy_step for each in drawn], dtype=np.int32),
            supports=tuple(each.support for each in drawn),
            num_cached=turn.num_cached,
            routed_experts_TLk=routes_TLk,
            routed_layers=self.model.cfg.routed_layers,
            stop=stop,
            matched=turn.matched,
        )
        if not turn.done.done():
            turn.done.set_result(generation)

    def _is_stopped(self, turn: _Turn, token: int) -> bool:
        if token in turn.request.sampling.stop_token_ids:
            turn.matched = token
        elif turn.matcher is not None:
            assert self.tokenizer is not None
            turn.matcher.feed(self.tokenizer.decode_bytes([token]))
            turn.matched = turn.matcher.stop
        return turn.matched is not None


def require_served(cfg: K3Config, lora: LoraConfig | None, device: torch.device) -> None:
    """Raises ValueError for what a GPU's captured graphs cannot compute yet: packed experts, and adapters of experts."""
    if device.type == "cpu":
        return
    if cfg.expert_quantization is not None:
        raise ValueError(
            f"model.expert_quantization {cfg.expert_quantization}: the engine serves packed experts on the CPU only"
        )
    experts = [f"layers.{i}.block_sparse_moe.experts.{name}" for i in cfg.moe_layers for name in EXPERT_MATRICES]
    targeted = [] if lora is None else [path for path in experts if lora.is_target(path)]
    if targeted:
        raise ValueError(f"adapter of {targeted[0]}: the engine serves adapters of experts on the CPU only")


def _make_runner(model: K3Model, state: SlotState, is_invariant: bool) -> Runner:
    if model.embed_tokens.weight.device.type == "cpu":
        return CpuRunner(model, state)
    from k3core.rollout.gpu_runner import GpuRunner  # where there is no GPU, Triton need not be installed

    return GpuRunner(model, state, is_invariant)


def _lease(turn: _Turn) -> Lease:
    assert turn.lease is not None, turn.request.sequence
    return turn.lease


def _rank(turn: _Turn) -> tuple[int, int]:
    return turn.request.priority, turn.arrival


def _by_adapter(turns: Iterable[_Turn]) -> dict[str | None, list[_Turn]]:
    groups: dict[str | None, list[_Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.request.adapter, []).append(turn)
    return groups


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
