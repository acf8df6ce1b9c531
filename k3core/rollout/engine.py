"""Engine: token ids of a history in, sampled tokens out. K3Engine runs it over our own model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import ROWS, Forward, K3Model
from k3core.model.state import SlotState
from k3core.model.weights import load_tensors, named_tensors
from k3core.rollout.sampling import sample, sequence_generator
from k3core.rollout.scheduler import Waiting, schedule
from k3core.types import SamplingParams
from k3kernels.packing import Packing


@dataclass(frozen=True, slots=True)
class SampledToken:
    """logprob under the distribution that it was drawn from, raw_logprob under softmax of the logits as they were."""

    token: int
    logprob: float
    raw_logprob: float
    policy_step: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn of one sequence. `tokens` is its whole history; what the engine has seen of it must be its prefix.

    on_token hears each token once, in order, as it is drawn; it must not block.
    """

    sequence: str
    tokens: Sequence[int]
    sampling: SamplingParams
    seed: int
    on_token: Callable[[SampledToken], None] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What one turn produced.

    logprobs_T are under the sampling distribution; policy_step_T is the version that drew each token.
    routed_experts_TLk covers the inputs [first_routed, first_routed + len): histories are fed once, so the routes
    of all turns of a sequence lie end to end; routed_layers names the layers, in order.
    """

    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    policy_step_T: np.ndarray
    first_routed: int
    routed_experts_TLk: np.ndarray
    routed_layers: tuple[str, ...]
    stop: Literal["end_of_turn", "max_tokens", "max_length"]


class Engine(Protocol):
    """Any engine: ours in this process, or a server's client."""

    @property
    def policy_step(self) -> int: ...

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve these weights from now on. Raises RuntimeError while sequences are open."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """One turn. When the caller is cancelled, the turn leaves the batch and the sequence is forgotten."""

    def release(self, sequence: str) -> None:
        """Forget a sequence, whatever it is doing; its slot is free. One that is not known is no error."""


@dataclass(slots=True)
class _Sequence:
    slot: int
    generator: np.random.Generator
    fed: list[int] = field(default_factory=list)  # what its slot has seen


@dataclass(slots=True)
class _Turn:
    request: GenerateRequest
    done: asyncio.Future[Generation]
    first_routed: int = 0
    drawn: list[SampledToken] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)


class K3Engine:
    """Continuous batching over our model.

    One loop per engine: it takes waiting turns (prefilling what is new of their histories into the state they go
    on from), decodes one token for all running sequences, gives finished turns back, and yields to the event loop
    so that their episodes can run tools and come again. A sequence keeps its slot between turns until released.

    What a sequence gets, to the last bit, depends on its tokens and its seed and not on its neighbours: sums run over
    its own history, and tokens are computed in multiples of ROWS (docs/policy.md says where that was seen to hold).
    """

    def __init__(
        self,
        cfg: K3Config,
        stop_token: int,
        num_slots: int,
        max_length: int,
        max_prefill_tokens: int = 4096,
        lora: LoraConfig | None = None,
    ) -> None:
        self.num_slots = -(-num_slots // ROWS) * ROWS
        self.model = K3Model(cfg)
        if lora is not None:
            attach_lora(self.model, lora, torch.Generator())
        self.model.requires_grad_(False)
        self.state = SlotState(cfg, self.num_slots, max_length)
        self.stop_token = stop_token
        self.max_length = max_length
        self.max_prefill_tokens = max_prefill_tokens
        self.route_dtype = np.uint8 if cfg.num_experts < 255 else np.uint16
        self._step = -1
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: dict[str, _Turn] = {}
        self._running: dict[str, _Turn] = {}
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def policy_step(self) -> int:
        return self._step

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        if self._sequences:
            raise RuntimeError(f"{len(self._sequences)} sequences are open; their states belong to step {self._step}")
        load_tensors(self.model, dict(tensors))
        self._step = step

    def served_tensors(self) -> dict[str, Tensor]:
        """The weights that it computes with, by checkpoint name."""
        return named_tensors(self.model)

    async def generate(self, request: GenerateRequest) -> Generation:
        name = request.sequence
        assert self._step >= 0, "load weights first"
        assert name not in {*self._waiting, *self._running}, f"{name}: its turn is not over"
        assert request.sampling.max_tokens > 0, name
        if request.sampling.stop or request.sampling.stop_token_ids:
            raise ValueError(
                f"{name}: this engine ends a turn at its stop token {self.stop_token} only: leave stop and stop_token_ids empty"
            )
        if len(request.tokens) >= self.max_length:
            raise ValueError(
                f"history of {len(request.tokens)} tokens leaves no room below max_length {self.max_length}"
            )
        fed = self._sequences[name].fed if name in self._sequences else []
        goes_on = len(request.tokens) > len(fed) and list(request.tokens[: len(fed)]) == fed
        assert goes_on, f"{name}: its history does not begin with the {len(fed)} tokens that were fed"
        turn = _Turn(request, asyncio.get_running_loop().create_future())
        self._waiting[name] = turn
        self._wake()
        try:
            return await turn.done
        except asyncio.CancelledError:
            if any(turns.get(name) is turn for turns in (self._waiting, self._running)):
                self.release(name)  # its slot is ahead of a history that will never hear of this turn
            raise

    def release(self, sequence: str) -> None:
        for turns in (self._waiting, self._running):
            if sequence in turns:
                turns.pop(sequence).done.cancel()
        self._sequences.pop(sequence, None)
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._loop())

    async def _loop(self) -> None:
        """Runs while a turn can go on; when all that wait need a slot, `release` wakes it. A fault reaches every turn."""
        try:
            while True:
                took, decoded = self._prefill(), self._decode()
                if not (took or decoded):
                    return
                await asyncio.sleep(0)  # finished turns wake their episodes, which may ask again before the next pass
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
        """Give the fault to every turn and forget their sequences, whose states may stand between two positions."""
        turns = [*self._waiting.values(), *self._running.values()]
        self._waiting.clear()
        self._running.clear()
        for turn in turns:
            self._sequences.pop(turn.request.sequence, None)
            if not turn.done.done():
                turn.done.set_exception(fault)

    @torch.no_grad()
    def _prefill(self) -> bool:
        """Feed what is new of the waiting histories that fit; True if there were any."""
        plan = schedule(self._all_waiting(), self._free_slots(), self.max_prefill_tokens)
        if not plan.prefill:
            return False
        turns, pieces, slots = [], [], []
        for name, slot in plan.prefill:
            turn = self._waiting[name]
            if name not in self._sequences:
                self.state.reset(slot)
                self._sequences[name] = _Sequence(slot, sequence_generator(turn.request.seed))
            turn.first_routed = len(self._sequences[name].fed)
            pieces.append(list(turn.request.tokens[turn.first_routed :]))
            turns.append(turn)
            slots.append(slot)
        packing = Packing(tuple(len(piece) for piece in pieces))
        tokens_T = torch.tensor([token for piece in pieces for token in piece])
        forward = self.model(tokens_T, packing, None, self.state, torch.tensor(slots))
        routes = _as_routes(forward, self.route_dtype)
        for turn, start, piece in zip(turns, packing.starts_N.tolist(), pieces, strict=True):
            name = turn.request.sequence
            self._sequences[name].fed += piece
            turn.routes.append(routes[start : start + len(piece)])
            self._running[name] = self._waiting.pop(name)
        self._sample(turns, forward.hidden_TD, packing.last_N.tolist())
        return True

    def _all_waiting(self) -> list[Waiting]:
        waiting = []
        for name, turn in self._waiting.items():
            known = self._sequences.get(name)
            num_tokens = len(turn.request.tokens) - (len(known.fed) if known else 0)
            waiting.append(Waiting(name, num_tokens, known.slot if known else None))
        return waiting

    def _free_slots(self) -> list[int]:
        used = {sequence.slot for sequence in self._sequences.values()}
        return [slot for slot in range(self.num_slots) if slot not in used]

    @torch.no_grad()
    def _decode(self) -> bool:
        """One token for every running turn; True if there were any."""
        turns = list(self._running.values())
        if not turns:
            return False
        self._close_ranks()
        slots = [self._sequences[turn.request.sequence].slot for turn in turns]
        num_rows = -(-(max(slots) + 1) // ROWS) * ROWS
        tokens_N = torch.zeros(num_rows, dtype=torch.long)
        is_active_N = torch.zeros(num_rows, dtype=torch.bool)
        tokens_N[slots] = torch.tensor([turn.drawn[-1].token for turn in turns])
        is_active_N[slots] = True
        forward = self.model.decode(tokens_N, self.state, is_active_N)
        routes = _as_routes(forward, self.route_dtype)
        for turn, slot in zip(turns, slots, strict=True):
            self._sequences[turn.request.sequence].fed.append(turn.drawn[-1].token)
            turn.routes.append(routes[slot : slot + 1])
        self._sample(turns, forward.hidden_TD, slots)
        return True

    def _close_ranks(self) -> None:
        """Move sequences out of high slots when fewer rows would hold all: a batch reaches to its highest slot."""
        num_rows = -(-len(self._sequences) // ROWS) * ROWS
        free = [slot for slot in self._free_slots() if slot < num_rows]
        for sequence in self._sequences.values():
            if sequence.slot >= num_rows:
                target = free.pop(0)
                self.state.move(sequence.slot, target)
                sequence.slot = target

    def _sample(self, turns: Sequence[_Turn], hidden_TD: Tensor, rows: Sequence[int]) -> None:
        """Draw the next token of each turn from its row."""
        rounded_up = [*rows, *[rows[0]] * (-len(rows) % ROWS)]
        logits_NV = self.model.logits(hidden_TD[rounded_up])[: len(rows)]
        if not torch.isfinite(logits_NV).all():
            raise FloatingPointError(f"the logits of step {self._step} are not finite")
        uniform_N = [self._sequences[turn.request.sequence].generator.random() for turn in turns]
        draws = sample(logits_NV, [turn.request.sampling for turn in turns], uniform_N)
        columns = (draws.tokens_N.tolist(), draws.logprobs_N.tolist(), draws.raw_logprobs_N.tolist())
        for turn, token, logprob, raw_logprob in zip(turns, *columns, strict=True):
            drawn = SampledToken(token, logprob, raw_logprob, self._step)
            turn.drawn.append(drawn)
            if turn.request.on_token is not None:
                turn.request.on_token(drawn)
            self._finish_if_done(turn)

    def _finish_if_done(self, turn: _Turn) -> None:
        stop: Literal["end_of_turn", "max_tokens", "max_length"]
        if turn.drawn[-1].token == self.stop_token:
            stop = "end_of_turn"
        elif len(turn.drawn) >= turn.request.sampling.max_tokens:
            stop = "max_tokens"
        elif len(turn.request.tokens) + len(turn.drawn) >= self.max_length:
            stop = "max_length"
        else:
            return
        del self._running[turn.request.sequence]
        generation = Generation(
            tokens_T=np.array([drawn.token for drawn in turn.drawn], dtype=np.int32),
            logprobs_T=np.array([drawn.logprob for drawn in turn.drawn], dtype=np.float32),
            policy_step_T=np.array([drawn.policy_step for drawn in turn.drawn], dtype=np.int32),
            first_routed=turn.first_routed,
            routed_experts_TLk=np.concatenate(turn.routes),
            routed_layers=self.model.cfg.routed_layers,
            stop=stop,
        )
        if not turn.done.done():
            turn.done.set_result(generation)


def _as_routes(forward: Forward, dtype: type[np.unsignedinteger]) -> np.ndarray:
    return forward.routed_experts_TLk.numpy().astype(dtype)
