"""Each product of the experts alone: ours in several tiles beside torch's grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from harness import time_on_device
from moe_inputs import BETAS, Inputs
from torch import Tensor

from k3kernels.moe import fp8, grouped
from k3kernels.moe.grouped import GroupedTile, Scaled, Schedule, Tiles
from k3kernels.moe.pairs import combine, sort_pairs, stage, unstage

PARTS = (
    "glue",
    "gated",
    "h_alone",
    "gated_apart",
    "down",
    "hidden",
    "inputs",
    "weights",
    "fp8_gated",
    "fp8_down",
)
_TOY = GroupedTile(16, 32, 16, 4, 2)
TOY_TILES = Tiles(_TOY, _TOY, _TOY, _TOY, _TOY)

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
CANDIDATES = {
    "gated": _GATED_TILES,
    "h_alone": (_NARROW, replace(_NARROW, is_flat=True)),
    "gated_apart": (_WIDE, replace(_WIDE, is_flat=True)),
    "fp8_gated": tuple(replace(tile, depth=128) for tile in (*_GATED_TILES[:5], *_GATED_TILES[7:9])),
    "fp8_down": tuple(replace(tile, depth=128) for tile in (*_WIDE_TILES[:5], *_WIDE_TILES[7:9])),
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


def scaled_grouped_mm(x: Scaled, w: Scaled, ends: Tensor) -> Tensor:
    options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    y: Tensor = torch._scaled_grouped_mm(x.values, w.values.mT, x.scale, w.scale, **options)
    return y


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
    w13 = torch.cat((inputs.w1, inputs.w3), 1) if {"gated", "inputs", "fp8_gated"} & {*parts} else inputs.w1
    gate_up = torch.cat((gate, up), 1) if "inputs" in parts or "weights" in parts else gate
    peers: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "gated": (2, lambda: torch._grouped_mm(xs, w13.mT, offs=ends)),
        "down": (1, lambda: torch._grouped_mm(h, inputs.w2.mT, offs=ends)),
        "hidden": (1, lambda: torch._grouped_mm(grad, inputs.w2, offs=ends)),
        "inputs": (2, lambda: torch._grouped_mm(gate_up, w13, offs=ends)),
        "weights": (2, lambda: torch._grouped_mm(gate_up.mT, xs, offs=ends)),
    }
    ours: dict[str, tuple[int, Callable[[Schedule, GroupedTile], object]]] = {
        "gated": (2, lambda s, t: grouped.gate_up(xs, inputs.w1, inputs.w3, s, BETAS, t, True)),
        "down": (1, lambda s, t: grouped.rows_product(h, inputs.w2, s, t)),
        "hidden": (1, lambda s, t: grouped.inputs_gradient(grad, inputs.w2, s, t)),
        "inputs": (2, lambda s, t: grouped.inputs_gradient(gate, inputs.w1, s, t, (up, inputs.w3))),
        "weights": (1, lambda _, t: grouped.weights_gradient(gate, xs, pairs, t)),
    }
    ours["h_alone"] = (2, lambda s, t: grouped.gate_up(xs, inputs.w1, inputs.w3, s, BETAS, t, False))
    ours["gated_apart"] = (2, lambda s, t: activate_two(*(grouped.rows_product(xs, w, s, t) for w in two)))
    if "fp8_gated" in parts or "fp8_down" in parts:
        x8, h8 = fp8.stage_fp8(inputs.x, pairs), fp8.quantise_rows(h, pairs)
        w1, w3, w2 = (fp8.quantise_matrices(w) for w in (inputs.w1, inputs.w3, inputs.w2))
        both = fp8.quantise_matrices(w13) if "fp8_gated" in parts else w1
        timed("stage_fp8", lambda: fp8.stage_fp8(inputs.x, pairs))
        timed("quantise_rows", lambda: fp8.quantise_rows(h, pairs))
        peers["fp8_gated"] = (2, lambda: scaled_grouped_mm(x8, both, ends))
        peers["fp8_down"] = (1, lambda: scaled_grouped_mm(h8, w2, ends))
        ours["fp8_gated"] = (2, lambda s, t: grouped.gate_up(x8, w1, w3, s, BETAS, t, False))
        ours["fp8_down"] = (1, lambda s, t: grouped.rows_product(h8, w2, s, t))
    for part, (products, run) in ours.items():
        if part not in parts:
            continue
        if part in peers:
            count, peer = peers[part]
            timed(f"{part}: torch", peer, count)
        candidates = (_TOY,) if is_toy else CANDIDATES[part]
        if tile is not None:
            part_of_tile, _, text = tile.rpartition(":")
            candidates = (parse_tile(text),) if part_of_tile in ("", part) else ()
        for candidate in candidates:
            schedule = Schedule(pairs)
            schedule.table(candidate)
            timed(f"{part}: {candidate}", lambda s=schedule, t=candidate, run=run: run(s, t), products)
