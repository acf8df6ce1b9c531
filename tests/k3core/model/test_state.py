"""Prefill and decode against the full forward pass: convolution window, KDA state and MLA rows stand at one position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.kda import CHUNK
from k3core.model.model import K3Model
from k3core.model.state import SlotState
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

LENGTH = 2 * CHUNK + 3
CUTS = (0, 1, 2, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, LENGTH - 1, LENGTH)


@pytest.fixture
def tokens_T() -> Tensor:
    return torch.randint(61, (LENGTH,), generator=torch.Generator().manual_seed(3))


def logprobs(model: K3Model, hidden_TD: Tensor) -> Tensor:
    return torch.log_softmax(model.logits(hidden_TD), -1)


@torch.no_grad()
def full(model: K3Model, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and routes of one pass over the whole sequence."""
    forward = model(tokens_T, Packing((len(tokens_T),)))
    return logprobs(model, forward.hidden_TD), forward.routed_experts_TLk


@torch.no_grad()
def prefill(
    model: K3Model, state: SlotState, pieces: Sequence[Tensor], slots: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Logprobs and routes of each piece; pieces without a token are left out, as an engine would."""
    taken = [(piece, slot) for piece, slot in zip(pieces, slots, strict=True) if len(piece)]
    packing = Packing(tuple(len(piece) for piece, _ in taken))
    forward = model(
        torch.cat([piece for piece, _ in taken]), packing, None, state, torch.tensor([slot for _, slot in taken])
    )
    results = iter(
        zip(
            logprobs(model, forward.hidden_TD).split(packing.lengths),
            forward.routed_experts_TLk.split(packing.lengths),
            strict=True,
        )
    )
    nothing = (forward.hidden_TD.new_zeros(0, model.cfg.vocab_size), forward.routed_experts_TLk[:0])
    return [next(results) if len(piece) else nothing for piece in pieces]


@torch.no_grad()
def decode_rest(model: K3Model, state: SlotState, tokens_T: Tensor, num_slots: int) -> list[tuple[Tensor, Tensor]]:
    """Decode the first slots from where each stands to the sequence's end, all together; early ones wait inactive."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_slots)]
    while (is_active_N := state.length_N[:num_slots] < len(tokens_T)).any():
        next_N = tokens_T[state.length_N[:num_slots].clamp(max=len(tokens_T) - 1)]
        forward = model.decode(next_N, state, is_active_N)
        logprobs_NV = logprobs(model, forward.hidden_TD)
        for n in is_active_N.nonzero().flatten().tolist():
            parts[n].append((logprobs_NV[n], forward.routed_experts_TLk[n]))
    return [
        (torch.stack([a for a, _ in part]), torch.stack([b for _, b in part]))
        if part
        else (logprobs_NV[:0], forward.routed_experts_TLk[:0])
        for part in parts
    ]


def at_cut(cut: int) -> Callable[[str], str]:
    return lambda message: f"cut {cut}: {message}"


def tensors_of(state: SlotState) -> list[Tensor]:
    """Of each layer and slot. Slots own their pages here, so a layer's pages are its slots' rows."""
    rows = [pages_PSC.unflatten(0, (state.num_slots, -1)) for pages_PSC in state.pages_PSC.values()]
    return [*state.kda_NHKV.values(), *state.window_NJP.values(), *rows]


def rows_of(state: SlotState) -> list[Tensor]:
    """What the slots have seen of their chunks: k, G, k e^-G and u of each layer."""
    return [
        tensor
        for rows in state.chunk_rows.values()
        for tensor in (rows.k_NHCK, rows.G_NHCK, rows.back_NHCK, rows.u_NHCV)
    ]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_prefill_to_any_cut_and_decode_from_there_equal_the_full_forward_pass(
    cfg: K3Config, random_model: RandomModel, tokens_T: Tensor, dtype: torch.dtype, atol: float
) -> None:
    model = random_model(cfg).to(dtype)
    want_TV, want_TLk = full(model, tokens_T)
    state = SlotState(cfg, len(CUTS), LENGTH, dtype)
    heads = prefill(model, state, [tokens_T[:cut] for cut in CUTS], range(len(CUTS)))
    tails = decode_rest(model, state, tokens_T, len(CUTS))
    for cut, (head_TV, head_TLk), (tail_TV, tail_TLk) in zip(CUTS, heads, tails, strict=True):
        assert (len(head_TV), len(tail_TV)) == (cut, LENGTH - cut)
        got_TV = torch.cat([head_TV, tail_TV])
        torch.testing.assert_close(got_TV, want_TV, rtol=0, atol=atol, msg=at_cut(cut))
        assert torch.equal(torch.cat([head_TLk, tail_TLk]), want_TLk), cut


def test_prefill_in_two_pieces_equals_one(cfg: K3Config, random_model: RandomModel, tokens_T: Tensor) -> None:
    model = random_model(cfg).double()
    want_TV, _ = full(model, tokens_T)
    state = SlotState(cfg, len(CUTS), LENGTH, torch.float64)
    slots = list(reversed(range(len(CUTS))))
    heads = prefill(model, state, [tokens_T[:cut] for cut in CUTS], slots)
    tails = prefill(model, state, [tokens_T[cut:] for cut in CUTS], slots)
    for cut, (head_TV, _), (tail_TV, _) in zip(CUTS, heads, tails, strict=True):
        got_TV = torch.cat([head_TV, tail_TV])
        torch.testing.assert_close(got_TV, want_TV, rtol=0, atol=1e-10, msg=at_cut(cut))


def test_all_states_of_a_slot_stand_where_a_longer_prefill_would_have_put_them(
    cfg: K3Config, random_model: RandomModel, tokens_T: Tensor
) -> None:
    model = random_model(cfg).double()
    state = SlotState(cfg, 3, LENGTH, torch.float64)
    prefill(model, state, [tokens_T[:CHUNK], tokens_T[: CHUNK + 3], tokens_T[:1]], [0, 1, 2])
    for t in range(CHUNK, CHUNK + 3):
        with torch.no_grad():
            model.decode(tokens_T[t].expand(3), state, torch.tensor([True, False, False]))
    prefill(model, state, [tokens_T[1 : CHUNK + 3]], [2])
    assert state.length_N.tolist() == [CHUNK + 3] * 3
    for tensor in tensors_of(state):
        torch.testing.assert_close(tensor[0], tensor[1], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(tensor[2], tensor[1], rtol=1e-10, atol=1e-10)


def test_sequences_of_one_token_equal_the_full_forward_pass(
    cfg: K3Config, random_model: RandomModel, tokens_T: Tensor
) -> None:
    model = random_model(cfg).double()
    state = SlotState(cfg, 3, 8, torch.float64)
    got = prefill(model, state, [tokens_T[:1], tokens_T[1:2], tokens_T[2:3]], [2, 0, 1])
    for t, (got_TV, _) in enumerate(got):
        want_TV, _ = full(model, tokens_T[t : t + 1])
        assert torch.isfinite(got_TV).all()
        torch.testing.assert_close(got_TV, want_TV, rtol=0, atol=1e-10)


def test_a_reset_slot_starts_clean_and_poisoned_free_slots_harm_nobody(
    cfg: K3Config, random_model: RandomModel, tokens_T: Tensor
) -> None:
    model = random_model(cfg)

    def run(state: SlotState) -> list[Tensor]:
        for slot in (1, 2):
            state.reset(slot)
        pieces = prefill(model, state, [tokens_T[:5], tokens_T[:CHUNK]], [1, 2])
        is_active_N = torch.isin(torch.arange(16), torch.tensor([1, 2]))
        with torch.no_grad():
            decoded = [model.decode(token.expand(16), state, is_active_N).hidden_TD[1:3] for token in tokens_T[:3]]
        return [piece for piece, _ in pieces] + decoded

    clean, poisoned = SlotState(cfg, 16, LENGTH), SlotState(cfg, 16, LENGTH)
    for tensor in (*poisoned.kda_NHKV.values(), *poisoned.window_NJP.values(), *rows_of(poisoned)):
        tensor.fill_(float("nan"))
    for pages_PSC in poisoned.pages_PSC.values():
        pages_PSC.fill_(1e30)
    poisoned.length_N.fill_(7)
    for got, want in zip(run(poisoned), run(clean), strict=True):
        assert torch.isfinite(want).all()
        assert torch.equal(got, want)


def test_inactive_slots_keep_every_bit_through_a_decode_step(
    cfg: K3Config, random_model: RandomModel, tokens_T: Tensor
) -> None:
    model = random_model(cfg)
    state = SlotState(cfg, 5, 24)
    prefill(model, state, [tokens_T[: CHUNK - 1], tokens_T[: CHUNK - 1], tokens_T[:24], tokens_T[:20]], [0, 1, 2, 3])
    before = [tensor.clone() for tensor in (*tensors_of(state), state.length_N)]
    seen_before = [tensor.clone() for tensor in rows_of(state)]
    with torch.no_grad():
        model.decode(tokens_T[:5], state, torch.tensor([False, True, False, True, False]))
    for rows, rows_before in zip(rows_of(state), seen_before, strict=True):
        for slot, num_seen in ((0, CHUNK - 1), (2, 24 - CHUNK)):
            assert torch.equal(rows[slot, :, :num_seen], rows_before[slot, :, :num_seen])
    for was, now in zip(before, (*tensors_of(state), state.length_N), strict=True):
        # The next token of 0 would end its chunk; 2 is full: not even its last row may be written.
        for slot in (0, 2, 4):
            assert torch.equal(was[slot], now[slot])
        assert not torch.equal(was[1], now[1])  # of KDA because its chunk ends here
    assert state.length_N.tolist() == [CHUNK - 1, CHUNK, 24, 21, 0]


def test_a_full_slot_takes_no_further_token(k3: K3Config, random_model: RandomModel, tokens_T: Tensor) -> None:
    model = random_model(k3)
    state = SlotState(k3, 1, 4)
    with pytest.raises(AssertionError):
        prefill(model, state, [tokens_T[:5]], [0])
    prefill(model, state, [tokens_T[:4]], [0])
    with pytest.raises(AssertionError):
        model.decode(tokens_T[:1], state, torch.tensor([True]))
