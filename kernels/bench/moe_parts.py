"""Each product of the experts alone: ours in several tiles beside torch's grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from harness import time_on_device
from moe_inputs import BETAS, Inputs
from moe_torch_fp8 import scaled_grouped_mm
from torch import Tensor

from k3kernels.moe import fp8, fp8_train, grouped
from k3kernels.moe.grouped import GroupedTile, Scaled, Schedule, Tiles
from k3kernels.moe.pairs import Pairs, combine, sort_pairs, stage, unstage

PARTS = (
    "glue",
    "gated",
    "h_alone",
    "gated_apart",
    "down",
    "hidden",
    "inputs",
    "weights",
    "fp8_glue",
    "fp8_gated",
    "fp8_rows",
    "fp8_keeps",
    "fp8_down",
    "fp8_hidden",
    "fp8_inputs",
)
Peer = Callable[[], object]
Run = Callable[[Schedule, GroupedTile], object]

_TOY = GroupedTile(16, 32, 16, 4, 2)
TOY_TILES = Tiles(replace(_TOY, columns=64), _TOY, _TOY, _TOY, _TOY)

_WIDE = GroupedTile(128, 256, 64, 8, 4)
_WIDE_TILES = (
    _WIDE,
    replace(_WIDE, is_persistent=False),
    replace(_WIDE, is_flat=True),
    replace(_WIDE, stages=3, is_flat=True),
    replace(_WIDE, stages=3),
    replace(_WIDE, band=4),
    replace(_WIDE, band=16),
    GroupedTile(256, 128, 64, 8, 4),
    GroupedTile(256, 128, 64, 8, 4, is_flat=True),
    GroupedTile(128, 128, 64, 4, 3),
    GroupedTile(128, 128, 64, 8, 4),
    GroupedTile(128, 128, 128, 8, 3),
    GroupedTile(64, 256, 64, 4, 4),
)
_NARROW = GroupedTile(128, 128, 64, 8, 4)
_GATED_TILES = (
    _NARROW,
    replace(_NARROW, is_persistent=False),
    replace(_NARROW, is_flat=True),
    replace(_NARROW, stages=3, is_flat=True),
    replace(_NARROW, stages=3),
    replace(_NARROW, band=4),
    replace(_NARROW, band=16),
    GroupedTile(256, 64, 64, 8, 4),
    GroupedTile(256, 64, 64, 8, 4, is_flat=True),
    GroupedTile(128, 64, 64, 4, 3),
    GroupedTile(64, 128, 64, 4, 4),
)
_FP8_GATED_TILES = (
    GroupedTile(128, 128, 128, 8, 4),
    GroupedTile(128, 128, 128, 8, 4, is_flat=True),
    GroupedTile(128, 128, 128, 8, 4, band=16),
    GroupedTile(256, 64, 128, 8, 4),
    GroupedTile(128, 64, 128, 4, 3),
    GroupedTile(128, 64, 128, 4, 3, is_flat=True),
)
_FP8_TILES = (
    GroupedTile(128, 256, 128, 8, 4),
    GroupedTile(128, 256, 128, 8, 4, is_flat=True),
    GroupedTile(128, 256, 128, 8, 4, band=16),
    GroupedTile(256, 128, 128, 8, 4),
    GroupedTile(128, 128, 128, 4, 3),
    GroupedTile(128, 128, 128, 4, 3, is_flat=True),
)
CANDIDATES = {
    "gated": _GATED_TILES,
    "h_alone": (_NARROW, replace(_NARROW, is_flat=True)),
    "gated_apart": (_WIDE, replace(_WIDE, is_flat=True)),
    "fp8_gated": _FP8_GATED_TILES,  # h in e4m3
    "fp8_rows": _FP8_GATED_TILES[:2],  # h in bf16, and quantised
    "fp8_keeps": _FP8_GATED_TILES,  # h in e4m3, and gate and up
    "fp8_down": _FP8_TILES,
    "fp8_hidden": _FP8_TILES,
    "fp8_inputs": _FP8_TILES,
    "down": _WIDE_TILES,
    "hidden": (*_WIDE_TILES[:5], *_WIDE_TILES[7:11]),
    "inputs": _WIDE_TILES,
    "weights": (*_WIDE_TILES[:3], *_WIDE_TILES[5:11], GroupedTile(128, 256, 32, 8, 4), GroupedTile(128, 128, 32, 4, 4)),
}


def parse_tile(text: str) -> GroupedTile:
    rows, columns, depth, warps, stages, *rest = (int(word) for word in text.split(","))
    band, is_persistent, is_flat = (*rest, *(8, 1, 0)[len(rest) :])
    return GroupedTile(rows, columns, depth, warps, stages, band, bool(is_persistent), bool(is_flat))


def with_tile(tiles: Tiles, text: str) -> Tiles:
    """text: PART:tile, several separated by `/`."""
    for choice in text.split("/"):
        part, _, tile = choice.partition(":")
        tiles = replace(tiles, **{part: parse_tile(tile)})
    return tiles


def measure(inputs: Inputs, parts: list[str], tile: str | None, repeats: int, is_toy: bool) -> None:
    """Prints a line a form; X_apart is X with the activation as a pass of its own."""
    (T, R), (E, F, _), k = inputs.x.shape, inputs.w1.shape, inputs.experts.shape[1]
    pairs = sort_pairs(inputs.experts, E)
    flops = 2 * T * k * R * F
    print(f"{T:,} tokens, {T * k:,} rows, {T * k / E:.0f} an expert", flush=True)

    def timed(what: str, work: Callable[[], object], products: int = 0) -> None:
        try:
            timing = time_on_device(what, work, repeats=max(repeats, 2), is_queued=True)
            rate = f"{products * flops / timing.median_ms / 1e9:6.0f} TFLOP/s" if products else ""
            print(f"{timing.median_ms:9.3f} ms  {rate}  {what}", flush=True)
        except Exception as error:  # a tile may not fit
            print(f"   failed: {what}: {type(error).__name__} {str(error)[:120]!r}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    xs, grad = stage(inputs.x, pairs), stage(inputs.grad, pairs)
    if "glue" in parts:
        timed("sort_pairs", lambda: sort_pairs(inputs.experts, E))
        timed("tiles", lambda: Schedule(pairs).table(_WIDE))
        timed("stage", lambda: stage(inputs.x, pairs))
        timed("combine", lambda: combine(xs, inputs.weights, pairs))
        timed("unstage", lambda: unstage(xs, pairs))
    gate, up = (torch.randn(T * k, F, device=xs.device, dtype=xs.dtype) for _ in range(2))
    h = grouped.activate(gate, up, pairs, BETAS)
    if "glue" in parts:
        timed("activate", lambda: grouped.activate(gate, up, pairs, BETAS))
        timed("activate_backward", lambda: grouped.activate_backward(h, inputs.weights, gate, up, pairs, BETAS))

    two = inputs.w1, inputs.w3

    def activate_two(gate: Tensor, up: Tensor) -> Tensor:
        return grouped.activate(gate, up, pairs, BETAS)

    ends = pairs.edges[1:]
    w13 = torch.cat((inputs.w1, inputs.w3), 1) if {"gated", "inputs"} & {*parts} else inputs.w1
    gate_up = torch.cat((gate, up), 1) if "inputs" in parts or "weights" in parts else gate
    peers: dict[str, tuple[int, Peer]] = {
        "gated": (2, lambda: torch._grouped_mm(xs, w13.mT, offs=ends)),
        "down": (1, lambda: torch._grouped_mm(h, inputs.w2.mT, offs=ends)),
        "hidden": (1, lambda: torch._grouped_mm(grad, inputs.w2, offs=ends)),
        "inputs": (2, lambda: torch._grouped_mm(gate_up, w13, offs=ends)),
        "weights": (2, lambda: torch._grouped_mm(gate_up.mT, xs, offs=ends)),
    }
    ours: dict[str, tuple[int, Run]] = {
        "gated": (2, lambda s, t: grouped.gate_up(xs, inputs.w1, inputs.w3, s, BETAS, t, True)),
        "down": (1, lambda s, t: grouped.rows_product(h, inputs.w2, s, t)),
        "hidden": (1, lambda s, t: grouped.inputs_gradient(grad, inputs.w2, s, t)),
        "inputs": (2, lambda s, t: grouped.inputs_gradient(gate, inputs.w1, s, t, (up, inputs.w3))),
        "weights": (1, lambda _, t: grouped.weights_gradient(gate, xs, pairs, t)),
    }
    ours["h_alone"] = (2, lambda s, t: grouped.gate_up(xs, inputs.w1, inputs.w3, s, BETAS, t, False))
    ours["gated_apart"] = (2, lambda s, t: activate_two(*(grouped.rows_product(xs, w, s, t) for w in two)))
    if any(part.startswith("fp8") for part in parts):
        of_peers, of_ours = _fp8_products(inputs, parts, pairs, gate, up, h, timed)
        peers |= of_peers
        ours |= of_ours
    for part, (products, run) in ours.items():
        if part not in parts:
            continue
        if part in peers:
            count, peer = peers[part]
            timed(f"{part}: torch", peer, count)
        candidates = (TOY_TILES.gated,) if is_toy else CANDIDATES[part]
        if tile is not None:
            part_of_tile, _, text = tile.rpartition(":")
            candidates = (parse_tile(text),) if part_of_tile in ("", part) else ()
        for candidate in candidates:
            schedule = Schedule(pairs)
            schedule.table(candidate)
            timed(f"{part}: {candidate}", partial(run, schedule, candidate), products)


def _fp8_products(
    inputs: Inputs, parts: list[str], pairs: Pairs, gate: Tensor, up: Tensor, h: Tensor, timed: Callable[..., None]
) -> tuple[dict[str, tuple[int, Peer]], dict[str, tuple[int, Run]]]:
    """torch's and ours, with the number of products of each; times what lies between them."""
    weights, ends, scale = inputs.weights, pairs.edges[1:], fp8.hidden_scale(BETAS)
    assert scale is not None
    x8, grad8, rows8 = fp8.stage_fp8(inputs.x, pairs), fp8.stage_fp8(inputs.grad, pairs), fp8.quantise_rows(h, pairs)
    h8 = Scaled(rows8.values, scale)
    matrices = fp8_train.Fp8Matrices.of(inputs.w1, inputs.w3, inputs.w2)
    w13, w2 = matrices.forward_w13, matrices.forward_w2_ERF
    w13_T, w2_T = matrices.backward_w13_ERF, matrices.backward_w2_EFR
    stacked = fp8.quantise_matrices(torch.cat((inputs.w1, inputs.w3), 1))

    def gated(h_scale: float | None, keeps: bool) -> Run:
        return lambda s, t: fp8.gate_up(x8, w13, h.shape[1], s, BETAS, h_scale, t, keeps)

    both = fp8_train.activate_backward(h, weights, gate, up, pairs, BETAS, False).both
    if "fp8_glue" in parts:
        timed("stage_fp8", lambda: fp8.stage_fp8(inputs.x, pairs))
        timed("quantise_rows", lambda: fp8.quantise_rows(h, pairs))
        for keeps in (False, True):
            backward = partial(fp8_train.activate_backward, h, weights, gate, up, pairs, BETAS, keeps)
            timed(f"activate_backward in fp8{' and bf16' * keeps}", backward)

    def torch_product(x: Scaled, w: Scaled) -> Peer:
        assert isinstance(x.scale, Tensor)
        assert isinstance(w.scale, Tensor)
        return partial(scaled_grouped_mm, (x.values, x.scale), (w.values, w.scale), ends)

    peers: dict[str, tuple[int, Peer]] = {
        "fp8_gated": (2, torch_product(x8, stacked)),
        "fp8_down": (1, torch_product(rows8, w2)),
        "fp8_hidden": (1, torch_product(grad8, w2_T)),
        "fp8_inputs": (2, torch_product(both, w13_T)),
    }
    ours: dict[str, tuple[int, Run]] = {
        "fp8_gated": (2, gated(scale, False)),
        "fp8_rows": (2, gated(None, False)),
        "fp8_keeps": (2, gated(scale, True)),
        "fp8_down": (1, lambda s, t: grouped.rows_product(h8, w2, s, t)),
        "fp8_hidden": (1, lambda s, t: grouped.rows_product(grad8, w2_T, s, t)),
        "fp8_inputs": (2, lambda s, t: grouped.rows_product(both, w13_T, s, t)),
    }
    return peers, ours
