"""Where an engine's arithmetic first leaves a trainer's: both compute the same histories, and every module's rows are compared.

The trainer passes over whole sequences; the engine prefills the prompts and decodes the rest from its state. Modules are
gone through in the order in which they ran: everything before the first difference is equal in every row, so it is there
that one was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from k3core.model.model import ROWS, K3Model
from k3core.model.state import SlotState
from k3core.rollout.cpu_runner import CpuRunner
from k3core.rollout.runner import Pieces
from k3kernels.packing import Packing

HEAD = "lm_head"

# What is computed between the modules of a layer, by the module that reads it.
BETWEEN = {
    "input_layernorm": "residuals",
    "post_attention_layernorm": "residuals",
    "norm": "residuals",
    "o_proj": "attention core",
    "routed_expert_norm": "experts",
    "routed_expert_up_proj": "experts",
    "down_proj": "activation",
}


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """place: a module's path and what of it. The first row of it that differs is of token `position` of a sequence.

    max_abs: over all rows of the place. weights: tensors of the two models there that are not equal, by name.
    """

    place: str
    sequence: int
    position: int
    is_prefill: bool
    max_abs: float
    weights: tuple[str, ...]

    def __str__(self) -> str:
        others = f" and {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
        return self.place + (f", of other weights ({self.weights[0]}{others})" if self.weights else "")


def first_difference(
    trainer: K3Model, engine: K3Model, histories: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> FirstDifference | None:
    """None when all rows of all modules are equal. Both models lie on the CPU and are of one config.

    Every module's inputs and outputs are kept for every token: for a few short histories.
    """
    packing = Packing(tuple(map(len, histories)))
    theirs, ours = _Tape(trainer, packing.num_tokens), _Tape(engine, packing.num_tokens)
    with torch.no_grad():
        _pass_over(theirs, histories, packing, prompt_lengths)
        _prefill_and_decode(ours, histories, packing, prompt_lengths)
    for path, want in theirs.calls.items():
        if (got := ours.calls.get(path)) is None:
            continue
        for part in ("input", "output"):
            differs_T = _differing_rows(getattr(want, part), getattr(got, part))
            if differs_T.any():
                row = int(differs_T.nonzero()[0])
                n, t = int(packing.seq_T[row]), int(packing.pos_T[row])
                place, weights = _name(path, part, trainer, engine, theirs)
                largest = (getattr(got, part)[differs_T].double() - getattr(want, part)[differs_T]).abs().max()
                return FirstDifference(place, n, t, t < prompt_lengths[n], float(largest), weights)
    return None


@dataclass(slots=True)
class _Call:
    """A module's rows for all T tokens; those that were not computed are zeros."""

    input: Tensor
    output: Tensor


@dataclass(slots=True)
class _Tape:
    """calls: by path, in the order in which modules first ran."""

    model: K3Model
    num_tokens: int
    calls: dict[str, _Call] = field(default_factory=dict)

    def put(self, path: str, rows: Tensor, x: Tensor, y: Tensor) -> None:
        """x and y: a module's input and output for these of the T tokens."""
        if path not in self.calls:
            self.calls[path] = _Call(*(part.new_zeros(self.num_tokens, *part.shape[1:]) for part in (x, y)))
        self.calls[path].input[rows] = x
        self.calls[path].output[rows] = y

    @contextmanager
    def recording(self, rows: Tensor, taken: Tensor) -> Iterator[None]:
        """One pass, whose rows `taken` are the tokens `rows`. Modules that hold others only pass their inputs on."""

        def listen(path: str) -> object:
            def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                self.put(path, rows, args[0][taken], output[taken])

            return hook

        hooks = [
            module.register_forward_hook(listen(path))
            for path, module in self.model.named_modules()
            if not any(module.children())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _pass_over(tape: _Tape, histories: Sequence[Sequence[int]], packing: Packing, prompts: Sequence[int]) -> None:
    rows_T = torch.arange(packing.num_tokens)
    with tape.recording(rows_T, rows_T):
        forward = tape.model(torch.tensor([token for history in histories for token in history]), packing)
    drawn_M = (packing.pos_T >= torch.tensor(prompts)[packing.seq_T] - 1).nonzero().flatten()
    hidden_MD = forward.hidden_TD[drawn_M]
    rows_MD = torch.cat([hidden_MD, hidden_MD[:1].expand(-len(hidden_MD) % ROWS, -1)])
    tape.put(HEAD, drawn_M, hidden_MD, tape.model.logits(rows_MD)[: len(drawn_M)])


def _prefill_and_decode(
    tape: _Tape, histories: Sequence[Sequence[int]], packing: Packing, prompts: Sequence[int]
) -> None:
    model, N, starts = tape.model, len(histories), packing.starts_N.tolist()
    num_slots = -(-N // ROWS) * ROWS
    state = SlotState(model.cfg, num_slots, packing.max_length, model.embed_tokens.weight.dtype)
    runner = CpuRunner(model, state)
    rows_T = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, prompts, strict=True)])
    tokens = [token for history, length in zip(histories, prompts, strict=True) for token in history[:length]]
    with tape.recording(rows_T, torch.arange(len(tokens))):
        forward = runner.prefill(Pieces(tokens, prompts, range(N), [0] * N))
    last_N = torch.tensor(prompts).cumsum(0) - 1
    tape.put(HEAD, rows_T[last_N], forward.hidden_TD[last_N], runner.logits(forward.hidden_TD[last_N]))
    for step in range(max(len(history) - length for history, length in zip(histories, prompts, strict=True))):
        slots = [n for n in range(N) if prompts[n] + step < len(histories[n])]
        positions = [prompts[n] + step for n in slots]
        rows = torch.tensor([starts[n] + position for n, position in zip(slots, positions, strict=True)])
        with tape.recording(rows, torch.tensor(slots)):
            logits_NV, _ = runner.decode(
                [histories[n][p] for n, p in zip(slots, positions, strict=True)], slots, positions
            )
        tape.put(HEAD, rows, tape.calls["norm"].output[rows], logits_NV)


def _differing_rows(a_T: Tensor, b_T: Tensor) -> Tensor:
    """Which of the T rows are not equal in every number; NaN equals NaN, and the two zeros each other."""
    differs = (a_T != b_T) & ~((a_T != a_T) & (b_T != b_T))
    return differs.flatten(1).any(1) if differs.ndim > 1 else differs


def _name(path: str, part: str, trainer: K3Model, engine: K3Model, tape: _Tape) -> tuple[str, tuple[str, ...]]:
    """An output differs where the input was equal: the module did it. An input: what lies before the module."""
    if part == "output":
        return f"{path} ({'logits' if path == HEAD else 'output'})", _other_weights(trainer, engine, [path])
    parent, _, leaf = path.rpartition(".")
    order = list(tape.calls)
    later = set(order[order.index(path) :])
    inside = [name for name, _ in trainer.named_modules() if f"{name}.".startswith(parent and f"{parent}.")]
    what = f"{BETWEEN[leaf]} before" if leaf in BETWEEN else "before"
    weights = _other_weights(trainer, engine, [name for name in inside if name not in later])
    return f"{parent or 'the model'} ({what} {leaf})", weights


def _other_weights(trainer: K3Model, engine: K3Model, paths: Sequence[str]) -> tuple[str, ...]:
    """Tensors of these modules themselves that the two models do not share."""
    found: list[str] = []
    for path in paths:
        ours, theirs = (_own_tensors(model.get_submodule(path)) for model in (engine, trainer))
        names = [*theirs, *(name for name in ours if name not in theirs)]
        found += [f"{path}.{name}" for name in names if not _are_equal(ours.get(name), theirs.get(name))]
    return tuple(found)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)
