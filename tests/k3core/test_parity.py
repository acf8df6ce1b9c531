"""One token's bits: a trainer's pass over whole sequences, prefill in any pieces and decoding in any batch agree exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import ROWS, K3Model, build_model
from k3core.model.presets import PRESETS
from k3core.model.state import SlotState
from k3kernels.kda import CHUNK
from k3kernels.packing import Packing

LENGTH = 5 * CHUNK + 7
CUTS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 31, 32, 33, LENGTH - 1)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def tiny(dtype: torch.dtype, lora: bool = False) -> K3Model:
    """Random weights with every part awake: reads of the residual bank, the gates' slopes, and an adapter if asked for."""
    cfg: K3Config = PRESETS["tiny"]
    generator = torch.Generator().manual_seed(1)
    model = build_model(cfg, dtype)
    with torch.no_grad():
        model.init_weights(generator)
        for name, p in model.named_parameters():
            if name.endswith(("res_proj.weight", "A_log")):
                p.normal_(0.0, 0.3, generator=generator)
        if lora:
            attach_lora(model, LoraConfig(4, 8.0, ("q_proj", "kv_b_proj", "o_proj", "w1", "w2")), generator)
            for name, p in model.named_parameters():
                if name.endswith("lora_B"):
                    p.normal_(0.0, 0.1, generator=generator)
    return model.requires_grad_(False)


def sequences(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(512, (LENGTH - 3 * (n % 5),), generator=generator) for n in range(num)]


def trainer_logits(model: K3Model, tokens: list[Tensor]) -> list[Tensor]:
    packing = Packing(tuple(len(t) for t in tokens))
    hidden_TD = model(torch.cat(tokens), packing).hidden_TD
    return list(logits(model, hidden_TD).split(packing.lengths))


def logits(model: K3Model, hidden_TD: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(hidden_TD, (0, 0, 0, -len(hidden_TD) % ROWS))
    return model.logits(rows)[: len(hidden_TD)]


def engine_logits(model: K3Model, tokens: list[Tensor], pieces: list[list[int]]) -> list[Tensor]:
    """Each sequence n in the pieces that end at pieces[n], then token by token, all slots together in one batch."""
    dtype = model.embed_tokens.weight.dtype
    state = SlotState(model.cfg, ROWS, LENGTH, dtype)
    outputs: list[list[Tensor]] = [[] for _ in tokens]
    for r in range(max(map(len, pieces))):
        taken = [n for n in range(len(tokens)) if r < len(pieces[n])]
        bounds = [((pieces[n][r - 1] if r else 0), pieces[n][r]) for n in taken]
        packing = Packing(tuple(b - a for a, b in bounds))
        inputs = torch.cat([tokens[n][a:b] for n, (a, b) in zip(taken, bounds, strict=True)])
        hidden_TD = model(inputs, packing, None, state, torch.tensor(taken)).hidden_TD
        for n, part in zip(taken, logits(model, hidden_TD).split(packing.lengths), strict=True):
            outputs[n].append(part)
    ends_N = torch.tensor([len(t) for t in tokens] + [0] * (ROWS - len(tokens)))
    while (is_active_N := state.length_N < ends_N).any():
        places = [min(int(p), len(t) - 1) for p, t in zip(state.length_N, tokens, strict=False)]
        next_N = torch.tensor([int(t[p]) for t, p in zip(tokens, places, strict=True)] + [0] * (ROWS - len(tokens)))
        logits_NV = logits(model, model.decode(next_N, state, is_active_N).hidden_TD)
        for n in is_active_N.nonzero().flatten().tolist():
            outputs[n].append(logits_NV[n : n + 1])
    return [torch.cat(parts) for parts in outputs]


@torch.no_grad()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("lora", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_in_any_pieces_and_decoding_give_the_trainers_bits(dtype: torch.dtype, lora: bool) -> None:
    model = tiny(dtype, lora)
    tokens = sequences(len(CUTS))
    pieces = [[cut] for cut in CUTS]
    pieces[0], pieces[3] = [1, 2, 3, 20, 21, 48, 49], [16, 17, 40]
    pieces = [[end for end in ends if end < len(t)] for ends, t in zip(pieces, tokens, strict=True)]
    want, got = trainer_logits(model, tokens), engine_logits(model, tokens, pieces)
    differing = sum(int((a != b).sum()) for a, b in zip(want, got, strict=True))
    assert differing == 0


@torch.no_grad()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequences_bits_do_not_depend_on_its_batch_or_its_place_in_it(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    needle, others = sequences(1)[0], sequences(40)[1:]
    (want,) = trainer_logits(model, [needle])
    for before, after in ((0, 1), (1, 0), (3, 4), (17, 22)):
        batch = [*others[:before], needle, *others[before : before + after]]
        assert torch.equal(trainer_logits(model, batch)[before], want), (before, after)
