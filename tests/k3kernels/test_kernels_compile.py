"""Every Triton kernel, compiled for the GPUs it is meant for on a machine that has none.

Run as a program, this file compiles and prints what it found: the tests run it as one, since in their own process
kernels are interpreted.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

HOPPER = (90,)  # whose instructions the GEMMs' tiles are made for
ARCHITECTURES = (*HOPPER, 100)  # Blackwell
MAX_SHARED_BYTES = 227 << 10  # on both


@dataclass(frozen=True)
class Case:
    """arguments: Triton's type words by parameter (of a tuple a tuple); constants: its constexprs. Pointers are 16-byte
    aligned.

    multiples: integers that are multiples of 16, as a model's widths are; a launch sees so for itself.
    stack_bytes: what a thread spills to memory, where it is known to.
    """

    module: str
    kernel: str
    arguments: dict[str, str | tuple[str, ...]]
    constants: dict[str, object]
    num_warps: int
    num_stages: int = 3
    multiples: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ARCHITECTURES
    stack_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kernel} {' '.join(map(str, self.constants.values()))}"


def xor_compact_cases() -> list[Case]:
    from k3kernels.xor_compact.triton import ORDERED_BLOCKS, TILES

    cases = []
    for width, tile in TILES.items():
        results = {"counts_ptr": "*i32", "offsets_ptr": "*i64", "checksums_ptr": "*i32"}
        records = {"records_ptr": "*i64" if width == 4 else "*i32"}
        compact = {"base_ptr": "*i32", "new_ptr": "*i32", **records, **results, "cursor_ptr": "*i64"}
        order = {"starts_ptr": "*i64", "positions_ptr": "*i16", "values_ptr": {1: "*u8", 2: "*i16", 4: "*i32"}[width]}
        cases += [
            Case(
                "xor_compact",
                "xor_compact_kernel",
                compact | {"capacity": "i64"},
                {"WIDTH": width, "BLOCK": tile.block, "PIECES": tile.pieces},
                tile.num_warps,
            ),
            Case(
                "xor_compact",
                "order_blocks_kernel",
                records | results | order | {"mismatches_ptr": "*i64", "num_blocks": "i32"},
                {"WIDTH": width, "ROWS": ORDERED_BLOCKS, "COLUMNS": 128},
                1,
            ),
        ]
    return cases


def gemm_case(module: str, kernel: str, tile, arguments: dict[str, str], constants: dict[str, object]) -> Case:
    shape = {"BM": tile.block_m, "SLICE": tile.slice, "PARTS": tile.parts, "BK": tile.block_k}
    constants = constants | shape | {"EVEN_K": True, "INTERPRETED": False}
    widths = tuple(name for name, kind in arguments.items() if kind == "i32" and name != "M")
    return Case(module, kernel, arguments, constants, tile.num_warps, tile.num_stages, widths, HOPPER)


def linear_cases() -> list[Case]:
    import torch

    from k3kernels.linear.triton import pick_grouped_tile, pick_tile

    narrow, single = ("*bf16", torch.bfloat16), ("*fp32", torch.float32)
    cases = []
    for rows, (pointer, dtype) in ((1, narrow), (512, narrow), (16384, narrow), (1, single), (4096, single)):
        pointers = dict.fromkeys(("x_ptr", "w_ptr"), pointer) | {"y_ptr": "*fp32"}
        sizes = dict.fromkeys(("M", "N", "K", "stride_x", "stride_w"), "i32")
        cases.append(gemm_case("linear", "linear_kernel", pick_tile(rows, 4096, 2048, dtype), pointers | sizes, {}))
    for rows, in_order in ((1, True), (512, False)):
        pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16")
        buckets = {"order_ptr": "*i32", "edges_ptr": "*i32"}
        sizes = dict.fromkeys(("N", "K", "stride_x"), "i32")
        constants = {"E": 64, "BE": 64, "IN_ORDER": in_order}
        tile = pick_grouped_tile(rows, 2048, 1024, torch.bfloat16)
        cases.append(gemm_case("linear", "grouped_linear_kernel", tile, pointers | buckets | sizes, constants))
    bucket = {"group_ptr": "*i64", "order_ptr": "*i32", "edges_ptr": "*i32", "P": "i32"}
    return [
        *cases,
        Case("linear", "bucket_kernel", bucket, {"E": 64, "BLOCK": 32, "STEP": 128}, 4, architectures=HOPPER),
        *persistent_cases(),
        *multi_lora_cases(),
    ]


def persistent_cases() -> list[Case]:
    """Of a bf16 and of an fp32 result, which has a stage fewer."""
    from k3kernels.linear.persistent import LARGE, stages

    constants = {"BM": LARGE.block_m, "BN": LARGE.slice, "BK": LARGE.block_k, "PARTS": LARGE.parts}
    cases = []
    for out, itemsize in (("bf16", 2), ("fp32", 4)):
        blocks = {
            "x_desc": f"tensordesc<bf16[{LARGE.block_m}, {LARGE.block_k}]>",
            "w_desc": f"tensordesc<bf16[{LARGE.slice}, {LARGE.block_k}]>",
            "y_desc": f"tensordesc<{out}[{LARGE.block_m}, {LARGE.slice // LARGE.parts}]>",
        }
        cases.append(
            Case(
                "linear.persistent",
                "persistent_product_kernel",
                blocks | dict.fromkeys("MNK", "i32"),
                constants | {"INTERPRETED": False},
                LARGE.num_warps,
                stages(LARGE, itemsize),
                multiples=("N", "K"),
                architectures=HOPPER,
            )
        )
    return cases


def multi_lora_cases() -> list[Case]:
    """Of 32 adapters of rank 64, in both of the passes' layouts; with the gradients that they make, and without."""
    from k3kernels.linear.multi_lora_launch import ACCUMULATE, EXPAND, PIECE, SHRINK

    def case(
        kernel: str, pointers: dict[str, str | None], sizes: str, constants: dict[str, object], warps: int
    ) -> Case:
        constants = constants | {"INTERPRETED": False, "EARLY": False}
        constants |= {name: None for name, kind in pointers.items() if kind is None}
        integers = tuple(name for name in sizes.split() if name not in constants)
        multiples = tuple(name for name in integers if name not in ("T", "num_tiles", "num_adapters"))
        arguments = {name: kind for name, kind in pointers.items() if kind is not None} | dict.fromkeys(integers, "i32")
        module = "linear.multi_lora_gradient" if kernel == "accumulate_kernel" else "linear.multi_lora_kernels"
        stages = ACCUMULATE["num_stages"] if kernel == "accumulate_kernel" else SHRINK["num_stages"]
        return Case(module, kernel, arguments, constants, warps, stages, multiples, HOPPER)

    tiles = dict.fromkeys(("order_ptr", "tiles_ptr", "ranks_ptr"), "*i32")
    product = (
        dict.fromkeys(("x_ptr", "w_ptr", "z_ptr"), "*bf16")
        | {"parts_ptr": "*fp32", "scale_ptr": "*fp32", "edges_ptr": "*i32"}
        | tiles
    )
    added = dict.fromkeys(("z_ptr", "w_ptr", "y_ptr"), "*bf16") | tiles
    gradient = {"x_ptr": "*bf16", "z_ptr": "*bf16", "grad_ptr": "*fp32", "order_ptr": "*i32", "edges_ptr": "*i32"}
    table = {"E": 33, "BE": 64, "BM": 64}
    pointers = {"edges_ptr": "*i32", "tiles_ptr": "*i32"}
    cases = [Case("linear.multi_lora_kernels", "tile_table_kernel", pointers, table, 4, architectures=HOPPER)]
    for BM in (64, 128, 256):
        shape, warps = {"R": 64, "SHARE": 1, "BM": BM}, min(8, BM // 16)
        for one, grad in (("k", None), ("r", "*fp32")):
            fixed = shape | {"PIECE": PIECE, "PIECES": 4, "BK": SHRINK["BK"], "EVEN": True, f"stride_w{one}": 1}
            more = {"arrived_ptr": "*i32", "other_ptr": grad and "*bf16", "grad_ptr": grad}
            sizes = "T num_tiles num_adapters K rank stride_x stride_wr stride_wk"
            cases.append(case("shrink_kernel", product | more, sizes, fixed, warps))
        for one, onto in (("r", "*bf16"), ("r", None), ("n", None)):
            fixed = shape | {"BR": 64, "BN": EXPAND["BN"], "COLUMNS": EXPAND["COLUMNS"], "STAGES": EXPAND["num_stages"]}
            fixed |= {"FULL_RANK": True, "EVEN": True, "IN_PLACE": onto is not None, f"stride_w{one}": 1}
            sizes = "num_adapters N rank stride_wn stride_wr"
            cases.append(case("expand_kernel", added | {"onto_ptr": onto}, sizes, fixed, warps))
    for one in ("r", "c"):
        fixed = {"R": 64, "BC": ACCUMULATE["BC"], "BK": ACCUMULATE["BK"], "FULL": True, f"stride_{one}": 1}
        sizes = "C rank stride_x stride_c stride_r"
        cases.append(case("accumulate_kernel", gradient, sizes, fixed, ACCUMULATE["num_warps"]))
    return cases


def moe_cases() -> list[Case]:
    import torch

    from k3kernels.linear.triton import pick_grouped_tile
    from k3kernels.moe.triton import COMBINED_COLUMNS

    cases = []
    for rows, pointer, dtype in (
        (1, "*bf16", torch.bfloat16),
        (512, "*bf16", torch.bfloat16),
        (512, "*fp32", torch.float32),
    ):
        pointers = dict.fromkeys(("x_ptr", "w1_ptr", "w3_ptr", "h_ptr"), pointer)
        others = {"order_ptr": "*i32", "edges_ptr": "*i32", **dict.fromkeys(("F", "R", "stride_x"), "i32")}
        betas = {"beta": "fp32", "linear_beta": "fp32"}
        constants = {"E": 64, "BE": 64, "SLOTS": 8, "KIND": 2}
        tile = pick_grouped_tile(rows, 1024, 2048, dtype, parts=1)
        cases.append(gemm_case("moe", "gate_up_kernel", tile, pointers | others | betas, constants))
    combine = {"y_ptr": "*bf16", "experts_ptr": "*i64", "weights_ptr": "*fp32", "out_ptr": "*bf16", "R": "i32"}
    constants = {"E": 64, "SLOTS": 8, "BLOCK": COMBINED_COLUMNS, "INTERPRETED": False}
    cases.append(Case("moe", "combine_kernel", combine, constants, 4, architectures=HOPPER))
    tiles = {"E": 896, "BE": 1024, "MAX_ROWS": 176, "ROUNDED": 16, "BLOCK": 8}
    pointers = {"edges_ptr": "*i32", "tiles_ptr": "*i32", "count": "i32"}
    cases.append(Case("moe.row_tiles", "row_tiles_kernel", pointers, tiles, 4, architectures=HOPPER))
    return [*cases, *router_cases()]


def router_cases() -> list[Case]:
    """Of Kimi-Linear's router, and of K3's, which replays."""
    logits, slots = {"logits_ptr": "*fp32"}, {"experts_ptr": "*i64", "scale": "fp32"}
    cases = []
    for E, k, num_warps, replay in ((256, 8, 1, {}), (896, 16, 4, {"replay_ptr": "*i32"})):
        sizes = {"E": E, "BE": 1 << (E - 1).bit_length(), "SLOTS": k, "BS": k, "RENORMALIZE": True}
        constants: dict[str, object] = sizes if replay else {**sizes, "replay_ptr": None}
        route = logits | slots | replay | {"bias_ptr": "*fp32", "weights_ptr": "*fp32"}
        gradient = logits | slots | {"grad_ptr": "*fp32", "grad_logits_ptr": "*fp32"}
        cases.append(Case("moe.router", "route_kernel", route, constants, num_warps, architectures=HOPPER))
        cases.append(Case("moe.router", "route_gradient_kernel", gradient, sizes, num_warps, architectures=HOPPER))
    return cases


def grouped_cases() -> list[Case]:
    """Of the experts in training and in fp8, at K3's sizes."""
    import torch

    from k3kernels.moe import fp8, fp8_kernels, grouped, pairs
    from k3kernels.moe.grouped_kernels import gated_gradient_kernel

    kinds = dict.fromkeys(("tiles_ptr", "edges_ptr", "order_ptr", "inverse_ptr"), "*i32")
    scales = ("x_scale_ptr", "w_scale_ptr", "scale_ptr")
    wide = ("weights_ptr", "parts_ptr", "grad_weights_ptr", *scales)
    kinds |= dict.fromkeys(wide, "*fp32") | dict.fromkeys(("beta", "linear_beta", "h_factor"), "fp32")
    kinds |= dict.fromkeys(("F", "R", "N", "K", "stride_x", "num_pairs", "max_tiles"), "i32")
    shape = {"E": 112, "SLOTS": 16, "KIND": 2, "INTERPRETED": False}

    def case(module, kernel, num_warps: int = 4, num_stages: int = 3, stack_bytes: int = 0, own=None, **values) -> Case:
        values = {name: value for name, value in (shape | values).items() if name in kernel.arg_names}
        given = kinds | (own or {})
        arguments = {name: given.get(name, "*bf16") for name in kernel.arg_names if name not in values}
        widths = tuple(name for name in ("F", "R", "N", "K", "stride_x") if name in arguments)
        name = module.__name__.removeprefix("k3kernels.")
        return Case(name, kernel.__name__, arguments, values, num_warps, num_stages, widths, HOPPER, stack_bytes)

    def tiled(kernel, tile, dtype: str, blocks: dict[str, tuple[int, int]], stack_bytes=0, own=None, **values) -> Case:
        own = dict(own or {})
        own |= {f"{name}_desc": f"tensordesc<{dtype}[{rows},{columns}]>" for name, (rows, columns) in blocks.items()}
        values |= {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "BAND": tile.band, "FLATTEN": tile.is_flat}
        if dtype == "bf16":
            values |= dict.fromkeys(scales)
        module = importlib.import_module(kernel.fn.__module__)
        return case(module, kernel, tile.warps, tile.stages, stack_bytes, own, **values)

    cases = []
    for _rows, dtype, tiles in (
        (146, "bf16", grouped.pick_tiles(146, torch.bfloat16)),
        (2340, "bf16", grouped.pick_tiles(2340, torch.bfloat16)),
        (2340, "fp8e4nv", fp8.FP8_TILES),
    ):
        tile = tiles.gated
        x, w = (tile.rows, tile.depth), (tile.columns, tile.depth)
        if dtype == "bf16":
            blocks = {"x": x, "w1": w, "w3": w}
            cases.append(tiled(grouped.gated_rows_kernel, tile, dtype, blocks, KEEPS=True))
        else:
            for keeps, h in ((False, "*fp8e4nv"), (True, "*fp8e4nv"), (False, "*bf16"), (True, "*bf16")):
                kept = "*bf16" if keeps else h
                own, blocks = {"h_ptr": h, "gate_ptr": kept, "up_ptr": kept}, {"x": x, "w": (2 * w[0], w[1])}
                cases.append(tiled(fp8_kernels.gated_fp8_kernel, tile, dtype, blocks, own=own, KEEPS=keeps))
        tile = tiles.down
        x, w = (tile.rows, tile.depth), (tile.columns, tile.depth)
        blocks = {"x": x, "w": w, "x2": x, "w2": w}
        cases.append(tiled(grouped.rows_product_kernel, tile, dtype, blocks, TWO=False, OUTER=False))
        if dtype != "bf16":
            of_all = {"x_scale_ptr": None}  # one scale of all rows, in the matrix's
            cases.append(tiled(grouped.rows_product_kernel, tile, dtype, blocks, TWO=False, OUTER=False, **of_all))
            continue
        tile = tiles.inputs
        x, w = (tile.rows, tile.depth), (tile.depth, tile.columns)
        blocks = {"x": x, "w": w, "x2": x, "w2": w}
        cases.append(tiled(grouped.rows_product_kernel, tile, dtype, blocks, TWO=True, OUTER=True))
        tile = tiles.weights
        blocks = {"y": (tile.depth, tile.rows), "x": (tile.depth, tile.columns)}
        cases.append(tiled(grouped.weights_gradient_kernel, tile, dtype, blocks))
    module = importlib.import_module("k3kernels.moe.grouped_kernels")
    block = {"BLOCK": grouped.COLUMNS}
    sorting = {"experts_ptr": "*i64", "P": "i32", "num_blocks": "i32"}
    sorting |= dict.fromkeys(("counts_ptr", "firsts_ptr"), "*i32")
    return [
        *cases,
        case(module, grouped.tiles_kernel, BE=128, BM=128, BAND=8, BT=32),
        case(module, grouped.gated_kernel, **block),
        case(module, gated_gradient_kernel, **block),
        *(case(pairs, k, own=sorting, BE=128, BLOCK=128) for k in (pairs.count_pairs_kernel, pairs.place_pairs_kernel)),
        case(pairs, pairs.scan_counts_kernel, 8, own=sorting, BE=128, STEP=64),
        case(pairs, pairs.stage_kernel, BLOCK=pairs.COLUMNS),
        case(pairs, pairs.combine_pairs_kernel, BLOCK=pairs.COLUMNS, WEIGHS=True),
        *fp8_cases(case),
    ]


def fp8_cases(case) -> list[Case]:
    """Of rows: quantised, and the activation's gradient with and without the bf16 rows that matrices' gradients take."""
    from k3kernels.moe import fp8, fp8_kernels

    whole = {"BLOCK": 4096, "MAX": fp8.FP8_MAX}
    gradient, own = fp8_kernels.gated_gradient_fp8_kernel, {"both_ptr": "*fp8e4nv"}
    absent = dict.fromkeys(("grad_gate_ptr", "grad_up_ptr", "h_ptr"))
    return [
        case(fp8_kernels, fp8_kernels.stage_fp8_kernel, own={"xs_ptr": "*fp8e4nv"}, **whole),
        case(fp8_kernels, fp8_kernels.quantise_rows_kernel, own={"values_ptr": "*fp8e4nv"}, **whole),
        *(case(fp8_kernels, gradient, 16, own=own, **whole, **values) for values in ({}, absent)),
    ]


def kda_cases() -> list[Case]:
    from k3kernels.kda.triton import BLOCK_V, CHUNK, NUM_WARPS

    rows = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16") | {
        "g_ptr": "*fp32",
        "beta_ptr": "*fp32",
        "o_ptr": "*bf16",
    }
    seen = {"seen_k_ptr": "*bf16", "seen_G_ptr": "*fp32", "seen_u_ptr": "*fp32"}
    work = ("starts", "lengths", "positions", "slots", "edges", "emit_positions", "emit_slots")
    pointers = rows | {"state_ptr": "*fp32"} | seen | {"checkpoints_ptr": "*fp32"} | {f"{x}_ptr": "*i32" for x in work}
    shape = {"H": 32, "K": 128, "V": 128, "BK": 128, "BV": BLOCK_V, "C": CHUNK}
    return [
        Case(
            "kda",
            "kda_aligned_kernel",
            pointers | {"scale": "fp32", "state_stride": "i32", "checkpoint_stride": "i32"},
            shape | {"PRECISION": "tf32x3"},
            NUM_WARPS,
            multiples=("state_stride", "checkpoint_stride"),
            architectures=HOPPER,
        )
    ]


def kda_chunk_cases() -> list[Case]:
    """At K3's heads. On Hopper the bounded gate's passes inside chunks are CUDA C++: these are for the rest, and spill."""
    import triton.language as tl

    from k3kernels.kda.chunk.forward import SETTINGS
    from k3kernels.kda.chunk.gradient import kda_gradient_kernel
    from k3kernels.kda.chunk.inter import kda_inter_backward_kernel, kda_inter_kernel
    from k3kernels.kda.chunk.intra import kda_intra_kernel

    wide = ("a_log_ptr", "dt_bias_ptr", "decay_ptr", "norms_ptr", "dt_bias_parts_ptr", "a_log_parts_ptr")
    wide += ("initial_ptr", "final_ptr", "emitted_ptr", "d_final_ptr", "d_initial_ptr")
    kinds = dict.fromkeys(wide, "*fp32") | {"scale": "fp32", "lower_bound": "fp32"}
    kinds |= dict.fromkeys(("starts_ptr", "lengths_ptr", "edges_ptr", "tokens_ptr", "emit_ptr"), "*i32")
    shape = {"H": 96, "K": 128, "V": 128, "R": 32, "C": 64, "DOT": tl.bfloat16, "PRECISION": "tf32"}
    shape |= {"BV": SETTINGS.inter_block_v, "STAGES": SETTINGS.inter_stages}
    shape |= {"INVERSE_PRECISION": SETTINGS.inverse_precision, "HAS_INITIAL": True, "HAS_FINAL": True}

    def case(kernel, module: str, num_warps: int, stack_bytes: int = 0, **constants: object) -> Case:
        values = {name: (shape | constants).get(name) for name in kernel.arg_names}
        constants = {name: value for name, value in values.items() if value is not None}
        arguments = {name: kinds.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
        module = f"kda.chunk.{module}"
        return Case(module, kernel.__name__, arguments, constants, num_warps, stack_bytes=stack_bytes)

    cases = []
    for is_bounded, stacks in ((True, (816, 1280)), (False, (968, 1408))):
        inside = {"BK": SETTINGS.intra_block_k, "IS_BOUNDED": is_bounded}
        cases.append(case(kda_intra_kernel, "intra", SETTINGS.intra_warps, stacks[0], **inside))
        inside = {"BK": SETTINGS.gradient_block_k, "IS_BOUNDED": is_bounded}
        cases.append(case(kda_gradient_kernel, "gradient", SETTINGS.gradient_warps, stacks[1], **inside))
    for keeps in (True, False):
        passes = {"KEEPS_STATES": keeps, "WRITES_O": not keeps, "HAS_EMITS": not keeps}
        cases.append(case(kda_inter_kernel, "inter", SETTINGS.inter_warps, **passes))
    return [*cases, case(kda_inter_backward_kernel, "inter", SETTINGS.inter_warps)]


def kda_step_cases() -> list[Case]:
    """At K3's heads: with convolution and norm, and without."""
    from k3kernels.kda.step import BLOCK_V, NUM_WARPS, RECORD_ROWS, kda_step_kernel

    kinds = dict.fromkeys(("scale", "lower_bound", "eps"), "fp32") | dict.fromkeys(("slots_ptr", "lengths_ptr"), "*i32")
    kinds |= dict.fromkeys(("state_stride", "window_stride", "W"), "i32")
    wide = ("taps_ptr", "a_log_ptr", "dt_bias_ptr", "norm_ptr", "states_ptr", "scratch_ptr")
    kinds |= dict.fromkeys(wide, "*fp32")
    shape = {"H": 96, "K": 128, "BV": BLOCK_V, "RECORD": RECORD_ROWS * 128, "IS_BOUNDED": True, "WRITES": True}
    cases = []
    for is_fused in (True, False):
        constants = shape | {"HAS_CONV": is_fused, "HAS_NORM": is_fused, "HAS_OUTPUTS": True, "INTERPRETED": False}
        arguments = {name: kinds.get(name, "*bf16") for name in kda_step_kernel.arg_names if name not in constants}
        strides = ("state_stride", "window_stride")
        cases.append(Case("kda.step", "kda_step_kernel", arguments, constants, NUM_WARPS, multiples=strides))
    return cases


def mla_cases() -> list[Case]:
    import torch

    from k3kernels.mla.triton import NUM_STAGES, NUM_WARPS, SPLIT, pick_tile

    H, C, R = 32, 576, 512
    tile = pick_tile(H, C, R, torch.bfloat16)
    parts = dict.fromkeys(("peak_ptr", "total_ptr", "part_ptr"), "*fp32")
    tables = dict.fromkeys(("table_ptr", "sequence_ptr", "position_ptr"), "*i32")
    paged = {"q_ptr": "*bf16", "pool_ptr": "*bf16"} | tables | parts | {"scale": "fp32"}
    paged |= dict.fromkeys(("page", "page_stride", "max_pages", "first"), "i32")
    shape = {"H": H, "C": C, "R": R} | tile | {"SPLIT": SPLIT, "INTERPRETED": False}
    merge = parts | {"position_ptr": "*i32", "out_ptr": "*bf16", "first": "i32", "num_splits": "i32"}
    merge_shape = {"H": H, "R": R, "BR": tile["BR"], "SPLIT": SPLIT}
    return [
        Case("mla", "mla_paged_kernel", paged, shape, NUM_WARPS, NUM_STAGES, ("page_stride",), HOPPER),
        Case("mla", "merge_splits_kernel", merge, merge_shape, 4, architectures=HOPPER),
    ]


def norm_cases() -> list[Case]:
    from k3kernels.rms_norm.triton import gradient_options, launch_options

    sizes = {"num_rows": "i32", "eps": "fp32"}
    plain = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16") | sizes
    gated = {"o_ptr": "*bf16", "gate_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16"} | sizes
    cases = []
    for kernel, arguments, D in (("rms_norm", plain, 512), ("rms_norm", plain, 7168), ("gated_rms_norm", gated, 128)):
        constants = launch_options(D) | {"INTERPRETED": False}
        num_warps = constants.pop("num_warps")
        cases.append(Case("rms_norm", f"{kernel}_kernel", arguments, constants, num_warps, architectures=HOPPER))
    gradient = (
        dict.fromkeys(("x_ptr", "weight_ptr", "grad_ptr", "grad_x_ptr"), "*bf16") | {"parts_ptr": "*fp32"} | sizes
    )
    gates = ("gate_ptr", "grad_gate_ptr")
    with_gate = gradient | dict.fromkeys(gates, "*bf16") | {"weight_ptr": "*fp32"}
    for arguments, D in (
        (with_gate, 128),
        (with_gate | {"x_ptr": "*fp32", "grad_x_ptr": "*fp32"}, 128),
        (gradient, 7168),
    ):
        constants = gradient_options(D) | {"INTERPRETED": False}
        num_warps = constants.pop("num_warps")
        constants |= {name: None for name in gates if name not in arguments}
        cases.append(Case("rms_norm", "rms_norm_gradient_kernel", arguments, constants, num_warps))
    return cases


def attn_res_cases() -> list[Case]:
    from k3kernels.attn_res.triton import (
        FORWARD_PROGRAMS,
        GRADIENT_PROGRAMS,
        ROWS_AHEAD,
        SUM_COLUMNS,
        SUM_ROWS,
        SUM_WARPS,
        launch_options,
    )

    R, D = 9, 7168
    cases = []
    # Of the gradient's registers, where Triton 3.7 has them all in use; the compiler of 3.6 takes 190 and spills none.
    for pointer, itemsize, gradient_stack in (("*bf16", 2, 120), ("*fp32", 4, 48)):
        options = launch_options(D, itemsize) | {"FETCHED_BYTES": D * itemsize, "INTERPRETED": False}
        num_warps = options.pop("num_warps")
        rows = {"row_ptrs": (pointer,) * R, "stride": "i32", "last_stride": "i32"}
        weights = dict.fromkeys(("norm_ptr", "proj_ptr", "next_norm_ptr"), pointer)
        forward = rows | weights | {"out_ptr": pointer, "saved_ptr": "*fp32"}
        forward |= {"num_tokens": "i32", "eps": "fp32", "next_eps": "fp32"}
        gradient = rows | {"grad_row_ptrs": (pointer,) * R, "grad_stride": "i32"} | weights
        gradient |= {"grad_ptr": pointer, "saved_ptr": "*fp32", "parts_ptr": "*fp32", "num_tokens": "i32"}
        programs = {"P": FORWARD_PROGRAMS, "AHEAD": ROWS_AHEAD}
        # Each without what may be absent, too: a saved_ptr and a next_norm, parts and a next_norm.
        for absent in ({}, {"saved_ptr": None, "next_norm_ptr": None}):
            arguments = forward | dict.fromkeys(absent, "constexpr")
            cases.append(Case("attn_res", "attn_res_kernel", arguments, options | programs | absent, num_warps))
        for absent, stack_bytes in (({}, gradient_stack), ({"parts_ptr": None, "next_norm_ptr": None}, 8)):
            cases.append(
                Case(
                    "attn_res",
                    "attn_res_gradient_kernel",
                    gradient | dict.fromkeys(absent, "constexpr"),
                    options | {"P": GRADIENT_PROGRAMS} | absent,
                    num_warps,
                    stack_bytes=stack_bytes,
                )
            )
        sums = {"parts_ptr": "*fp32", "norm_ptr": pointer, "proj_ptr": pointer}
        sums |= {"grad_norm_ptr": pointer, "grad_proj_ptr": pointer, "grad_next_norm_ptr": pointer, "num_parts": "i32"}
        shape = {"D": D, "P": GRADIENT_PROGRAMS, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS, "INTERPRETED": False}
        cases.append(Case("attn_res", "attn_res_sum_parts_kernel", sums, shape, SUM_WARPS))
    return cases


def situ_cases() -> list[Case]:
    from k3kernels.situ.triton import BLOCK

    sizes = dict.fromkeys(("F", "stride_gate", "stride_up"), "i32")
    betas = dict.fromkeys(("beta", "linear_beta"), "fp32")
    value = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16") | sizes | betas
    pointers = ("grad_ptr", "gate_ptr", "up_ptr", "grad_gate_ptr", "grad_up_ptr")
    gradient = dict.fromkeys(pointers, "*bf16") | sizes | {"stride_grad": "i32"} | betas
    return [
        Case(
            module,
            kernel,
            arguments,
            {"KIND": kind, "BLOCK": BLOCK, "INTERPRETED": False},
            4,
            multiples=tuple(sizes),
            architectures=HOPPER,
        )
        for module, kernel, arguments in (
            ("situ", "gated_activation_kernel", value),
            ("situ.train", "gated_activation_gradient_kernel", gradient),
        )
        for kind in (0, 1, 2)
    ]


def short_conv_cases() -> list[Case]:
    from k3kernels.short_conv.triton import BT, LAUNCH, NORM_EPS, NUM_WARPS, TILE

    rows = {
        "x_ptr": "*bf16",
        "taps_ptr": "*fp32",
        **dict.fromkeys(("window_ptr", "checkpoints_ptr", "out_ptr"), "*bf16"),
    }
    work = ("starts", "lengths", "positions", "slots", "edges", "emit_positions", "emit_slots")
    arguments = rows | {f"{x}_ptr": "*i32" for x in work}
    arguments |= dict.fromkeys(LAUNCH, "i32")
    shape = {"eps": NORM_EPS, "H": 32, "K": 128, "J": 4, "HB": TILE // 128, "BK": 128, "BT": BT, "INTERPRETED": False}
    fp32 = dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "g_ptr", "beta_ptr"), "*fp32")
    gates = {"f_ptr": "*bf16", "b_ptr": "*bf16", **fp32, "lower_bound": "fp32"}
    gates_shape = {"H": 32, "K": 128, "HB": TILE // 128, "BK": 128}
    return [
        Case("short_conv", "short_conv_kernel", arguments, shape, NUM_WARPS, architectures=HOPPER),
        *(
            Case(
                "short_conv",
                "kda_gates_kernel",
                gates,
                gates_shape | {"HAS_BOUND": has_bound},
                NUM_WARPS,
                architectures=HOPPER,
            )
            for has_bound in (True, False)
        ),
    ]


def short_conv_train_cases() -> list[Case]:
    """At K3's heads."""
    from k3kernels.short_conv.train import launch_options

    cases = []
    for pointer, itemsize in (("*bf16", 2), ("*fp32", 4)):
        constants = launch_options(96 * 128, itemsize) | {"J": 4, "INTERPRETED": False}
        num_warps = constants.pop("num_warps")
        common = {"x_ptr": pointer, "taps_ptr": "*fp32", "position_ptr": "*i64", "T": "i32"}
        forward = common | {"y_ptrs": (pointer,) * 3}
        gradient = common | {"grad_y_ptrs": (pointer,) * 3, "grad_x_ptr": pointer, "parts_ptr": "*fp32"}
        cases += [
            Case("short_conv.train", "short_conv_train_kernel", forward, constants, num_warps),
            Case("short_conv.train", "short_conv_gradient_kernel", gradient, constants, num_warps),
        ]
    return cases


def linear_logprob_cases() -> list[Case]:
    """At K3's vocabulary, and at one that fills no tile."""
    from k3kernels.linear_logprob.triton import KEPT_ROWS, MERGED_ROWS, MERGED_TILES, SLOPE_COLUMNS, TILE

    shape = {"BM": TILE.block_m, "BN": TILE.block_n, "BK": TILE.block_k, "GROUP": TILE.group}
    shape |= {"FLATTEN": TILE.flatten, "INTERPRETED": False}
    operands = {"h_desc": f"tensordesc<bf16[{TILE.block_m}, {TILE.block_k}]>"}
    operands |= {"w_desc": f"tensordesc<bf16[{TILE.block_n}, {TILE.block_k}]>"}
    written, kept = (f"tensordesc<{kind}[{TILE.block_m}, {TILE.block_n}]>" for kind in ("bf16", "fp16"))

    def case(kernel: str, arguments: dict[str, str], constants: dict[str, object], warps: int = 4, stages: int = 3):
        widths = tuple(name for name in ("D", "num_words", "stride", "stride_w") if name in arguments)
        return Case("linear_logprob", kernel, arguments, constants, warps, stages, widths, HOPPER)

    def floats(*names: str) -> dict[str, str]:
        return dict.fromkeys((f"{name}_ptr" for name in names), "*fp32")

    def tile_case(kernel: str, arguments: dict[str, str], absent: tuple[str, ...], constants: dict[str, object]):
        stages = TILE.writing_stages if {written, kept} & {*arguments.values()} else TILE.num_stages
        constants = shape | constants | dict.fromkeys(absent)
        return case(kernel, operands | {"token_ptr": "*i64"} | arguments, constants, TILE.num_warps, stages)

    sizes = {"M": "i32", "first": "i32", "num_words": "i32", "D": "i32", "scale": "fp32"}
    reduced = floats("highest", "total", "chosen") | sizes
    above = {"token_ptr": "*i64", "inverse_temperature": "fp32"} | floats("normalizer", "grad", "others")
    gradient = {"d_desc": written} | above | sizes
    of_kept = {"kept_ptr": "*fp16", "d_ptr": "*bf16", "stride": "i32"} | floats("highest") | above | sizes
    del of_kept["D"]
    of_entropy = floats("entropy", "grad_entropy")
    piece = {"ROWS": KEPT_ROWS, "BN": TILE.block_n, "INTERPRETED": False}
    cases = [
        tile_case("logits_gradient_kernel", gradient, tuple(of_entropy), {}),
        tile_case("logits_gradient_kernel", gradient | of_entropy, (), {}),
        case("kept_gradient_kernel", of_kept, piece | dict.fromkeys(of_entropy)),
        case("kept_gradient_kernel", of_kept | of_entropy, piece),
    ]
    for even in ({"EVEN": True}, {"EVEN": False}):
        cases += [
            tile_case("reduce_logits_kernel", reduced, ("weighted_ptr", "exps_desc", "kept_desc"), even),
            tile_case("reduce_logits_kernel", reduced | floats("weighted"), ("exps_desc", "kept_desc"), even),
            tile_case("reduce_logits_kernel", reduced | {"exps_desc": written}, ("weighted_ptr", "kept_desc"), even),
            tile_case("reduce_logits_kernel", reduced | {"kept_desc": kept}, ("weighted_ptr", "exps_desc"), even),
            tile_case("reduce_logits_kernel", reduced | {"kept_desc": kept} | floats("weighted"), ("exps_desc",), even),
        ]
    merged = floats("highest", "total", "chosen", "logprob", "entropy", "normalizer")
    merged |= {"M": "i32", "num_tiles": "i32", "scale": "fp32"}
    block = {"ROWS": MERGED_ROWS, "TILES": MERGED_TILES}
    aligned = {"exps_ptr": "*bf16", "token_ptr": "*i64"} | floats("highest", "unit")
    aligned |= {"M": "i32", "V": "i32", "num_tiles": "i32", "stride": "i32", "scale": "fp32"}
    slope = floats("sums", "unit", "normalizer", "logprob") | dict.fromkeys(("w_ptr", "out_ptr"), "*bf16")
    slope |= {"token_ptr": "*i64", "V": "i32", "D": "i32", "stride_w": "i32", "inverse_temperature": "fp32"}
    return [
        *cases,
        case("merge_kernel", merged, block | {"weighted_ptr": None}),
        case("merge_kernel", merged | floats("weighted"), block),
        case("align_kernel", aligned, {"BN": TILE.block_n, "TILES": 1024}),
        case("hidden_slope_kernel", slope, {"BLOCK": SLOPE_COLUMNS, "INTERPRETED": False}),
    ]


@cache
def modules_with_kernels() -> dict[str, ModuleType]:
    """By the name that a case gives: `op` for k3kernels.op.triton, else the path below the package."""
    import k3kernels

    names = [module.name for module in pkgutil.walk_packages(k3kernels.__path__, "k3kernels.")]
    named = {name.removeprefix("k3kernels.").removesuffix(".triton"): name for name in names}
    modules = {short: importlib.import_module(name) for short, name in named.items()}
    return {short: module for short, module in modules.items() if kernels_of(module)}


def kernels_of(module: ModuleType) -> set[str]:
    """Those that are launched, by their names' end, and are this module's own or re-exported by an op's `triton`."""
    from triton.runtime.jit import JITFunction

    is_op = module.__name__.endswith(".triton")
    mine = {name: x for name, x in vars(module).items() if isinstance(x, JITFunction) and name.endswith("_kernel")}
    return {name for name, x in mine.items() if is_op or x.fn.__module__ == module.__name__}


def kernels_of_the_package() -> set[str]:
    """module.kernel of every function that is launched."""
    found = {f"{short}.{name}" for short, module in modules_with_kernels().items() for name in kernels_of(module)}
    return {name for name in found if ".triton_kernels." not in name}  # re-exported


def compile_case(case: Case, architecture: int, folder: Path) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(modules_with_kernels()[case.module], case.kernel)
    given = case.arguments | dict.fromkeys(case.constants, "constexpr")
    assert set(given) == set(kernel.arg_names), f"{case.kernel} takes {kernel.arg_names}"
    signature = {name: given[name] for name in kernel.arg_names}
    aligned = {}
    for i, (name, kind) in enumerate(signature.items()):
        parts = [((i,), kind)] if isinstance(kind, str) else [((i, j), part) for j, part in enumerate(kind)]
        is_aligned = [place for place, part in parts if part.startswith("*") or name in case.multiples]
        aligned |= {place: [["tt.divisibility", 16]] for place in is_aligned}
    source = ASTSource(kernel, signature, constexprs=case.constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(
        source, target=target, options={"num_warps": case.num_warps, "num_stages": case.num_stages}
    )
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True, check=True
    )
    return {
        "case": case.name,
        "architecture": architecture,
        "is_bf16": case.arguments.get("x_ptr") == "*bf16",
        "stack_bytes": case.stack_bytes,
        "shared_bytes": compiled.metadata.shared,
        "ptx": compiled.asm["ptx"],
        "usage": usage.stdout,
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = subprocess.run(
        [sys.executable, __file__, folder],
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_every_kernel_of_the_package_is_compiled_here(compiled):
    assert set(compiled["kernels"]) == {found["case"].split()[0] for found in compiled["found"]}
    assert {found["architecture"] for found in compiled["found"]} == set(ARCHITECTURES)


def test_no_kernel_spills_more_registers_to_memory_than_is_known(compiled):
    for found in compiled["found"]:
        assert int(re.search(r" STACK:(\d+) ", found["usage"])[1]) <= found["stack_bytes"], (
            found["case"],
            found["architecture"],
            found["usage"],
        )


def test_every_kernel_fits_the_shared_memory_of_a_block(compiled):
    assert all(found["shared_bytes"] <= MAX_SHARED_BYTES for found in compiled["found"])


def test_the_fused_xor_loads_16_bytes_a_thread(compiled):
    cases = [found for found in compiled["found"] if found["case"].startswith("xor_compact.xor_compact_kernel")]
    for found in cases:
        loads = [line for line in found["ptx"].splitlines() if "ld.global" in line]
        assert loads, found["case"]
        assert all("ld.global.v4.b32" in line for line in loads), (found["case"], loads)


def test_the_training_convolution_moves_16_bytes_a_thread(compiled):
    """All but the positions of tokens."""
    cases = [found for found in compiled["found"] if found["case"].startswith("short_conv.train.")]
    assert cases
    for found in cases:
        moves = set(re.findall(r"(?:ld|st)\.global\S*", found["ptx"]))
        assert moves == {"ld.global.v4.b32", "ld.global.b64", "st.global.v4.b32"}, (found["case"], moves)


def instructions_of(found: dict) -> set[str]:
    """Those that multiply on a tensor core."""
    return set(re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\S*", found["ptx"]))


def test_on_hopper_every_number_of_rows_is_multiplied_16_products_a_step(compiled):
    """The instruction's width does not change an element's sum; its depth would."""
    wants = {True: {"wgmma.mma_async.sync.aligned.m64k16.f32.bf16.bf16"}, False: set()}
    cases = [f for f in compiled["found"] if re.match(r"\S*(linear|gate_up)_kernel", f["case"])]
    assert len(cases) >= 10
    for found in cases:
        depths = {re.sub(r"n\d+", "", instruction) for instruction in instructions_of(found)}
        assert depths == wants[found["is_bf16"]], found["case"]


@pytest.mark.parametrize(("kernel", "word"), [("kda.kda_aligned_kernel", "tf32"), ("mla.mla_paged_kernel", "bf16")])
def test_attention_multiplies_on_tensor_cores(compiled, kernel, word):
    cases = [found for found in compiled["found"] if found["case"].split()[0] == kernel]
    assert cases
    assert all(any(word in instruction for instruction in instructions_of(found)) for found in cases)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("is_b_bf16", [True, False])
@pytest.mark.parametrize(("module", "stack_bytes"), [("forward", 0), ("backward", 24)])
def test_the_cuda_sources_of_kda_compile_and_spill_no_more_than_is_known(
    module: str, stack_bytes: int, is_b_bf16: bool, architecture: str, tmp_path: Path
) -> None:
    import triton

    from k3kernels.nvrtc import compile_cubin

    source = importlib.import_module(f"k3kernels.kda.chunk.{module}").CUDA
    defines = source.defines() | ({"B_IS_BF16": 1} if is_b_bf16 else {})
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_cubin(source.path, architecture, defines))
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    assert source.function in usage
    assert int(re.search(r" STACK:(\d+) ", usage)[1]) <= stack_bytes, usage
    assert source.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize("keeps_states", [False, True])
@pytest.mark.parametrize(
    ("module", "products"), [("forward", {False: 28, True: 16}), ("backward", {False: 24, True: 24})]
)
def test_the_walk_over_chunks_multiplies_by_warpgroups_and_spills_nothing(
    module: str, products: dict[bool, int], keeps_states: bool, tmp_path: Path
) -> None:
    import triton

    from k3kernels.kda.chunk.forward import inter_defines
    from k3kernels.nvrtc import compile_cubin

    source = importlib.import_module(f"k3kernels.kda.chunk.{module}").INTER_CUDA
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_cubin(source.path, "sm_90a", source.defines() | dict(inter_defines(keeps_states))))

    def dump(what: str) -> str:
        command = [triton.knobs.nvidia.cuobjdump.path, what, "-fun", source.function, cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = dump("-res-usage")
    assert " STACK:0 " in usage
    assert dump("-sass").count("HGMMA") == products[keeps_states]
    assert source.shared_bytes <= MAX_SHARED_BYTES


def test_a_cuda_source_that_does_not_compile_says_where(tmp_path: Path) -> None:
    from k3kernels.nvrtc import compile_cubin

    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong() { int x = y; }')
    with pytest.raises(RuntimeError, match=r"(?s)wrong.cu does not compile for sm_90a:.*wrong.cu\(1\)"):
        compile_cubin(source, "sm_90a", {})


def main(folder: Path) -> None:
    cases = [
        *xor_compact_cases(),
        *linear_cases(),
        *moe_cases(),
        *grouped_cases(),
        *kda_cases(),
        *kda_chunk_cases(),
        *kda_step_cases(),
    ]
    cases += [
        *mla_cases(),
        *norm_cases(),
        *attn_res_cases(),
        *situ_cases(),
        *short_conv_cases(),
        *short_conv_train_cases(),
        *linear_logprob_cases(),
    ]
    found = [compile_case(case, architecture, folder) for case in cases for architecture in case.architectures]
    result = {"kernels": sorted(kernels_of_the_package()), "found": found}
    (folder / "found.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
