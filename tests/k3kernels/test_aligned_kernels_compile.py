"""The aligned KDA and paged MLA kernels at a model's shapes, compiled for Hopper on a machine that has no GPU.

Run as a program, this file compiles: the test runs it as one, since in its own process kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys


def compile_all() -> dict[str, list[str]]:
    """Kernel -> the tensor-core instructions in its code."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from k3kernels.kda.aligned_triton import CHUNK, kda_aligned_kernel
    from k3kernels.mla import paged_triton as mla

    rows = {
        "q_ptr": "*bf16",
        "k_ptr": "*bf16",
        "v_ptr": "*bf16",
        "g_ptr": "*fp32",
        "beta_ptr": "*fp32",
        "o_ptr": "*bf16",
    }
    seen = {"seen_k_ptr": "*bf16", "seen_v_ptr": "*bf16", "seen_g_ptr": "*fp32", "seen_beta_ptr": "*fp32"}
    work = ("starts", "lengths", "positions", "slots", "edges", "emit_positions", "emit_slots")
    kda = {**rows, "state_ptr": "*fp32", **seen, "checkpoints_ptr": "*fp32", **{f"{x}_ptr": "*i32" for x in work}}
    kda_shape = {"H": 32, "K": 128, "V": 128, "BK": 128, "BV": 32, "C": CHUNK, "PRECISION": "tf32x3"}
    parts = {"peak_ptr": "*fp32", "total_ptr": "*fp32", "part_ptr": "*fp32"}
    paged = {"q_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "sequence_ptr": "*i32", "position_ptr": "*i32"}
    paged |= {**parts, "scale": "fp32", **dict.fromkeys(("page", "max_pages", "first"), "i32")}
    paged_shape = {"H": 32, "C": 576, "R": 512, **mla.pick_tile(32, 576, 512, torch.bfloat16), "SPLIT": mla.SPLIT}
    merge = {**parts, "position_ptr": "*i32", "out_ptr": "*bf16", "first": "i32", "num_splits": "i32"}
    merge_shape = {"H": 32, "R": 512, "BR": 512, "SPLIT": mla.SPLIT}
    cases = [
        (kda_aligned_kernel, kda | {"scale": "fp32"}, kda_shape | {"IS_BOUNDED": True}, 4, 3),
        (kda_aligned_kernel, kda | {"scale": "fp32"}, kda_shape | {"IS_BOUNDED": False}, 4, 3),
        (mla.mla_paged_kernel, paged, paged_shape | {"INTERPRETED": False}, mla.NUM_WARPS, mla.NUM_STAGES),
        (mla.merge_splits_kernel, merge, merge_shape, 4, 3),
    ]
    found = {}
    for kernel, arguments, constants, num_warps, num_stages in cases:
        signature = arguments | dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        name = f"{kernel.__name__} {constants.get('IS_BOUNDED', '')}".strip()
        instructions = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*", compiled.asm["ptx"]))
        found[name] = [f"shared {compiled.metadata.shared}", *sorted(instructions)]
    return found


def test_the_kernels_compile_for_hopper_and_multiply_on_tensor_cores(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert program.returncode == 0, program.stderr[-3000:]
    found = json.loads(program.stdout)
    assert len(found) == 4
    assert any("bf16" in x for x in found["mla_paged_kernel"]), found
    for name in ("kda_aligned_kernel True", "kda_aligned_kernel False"):
        assert any("tf32" in x for x in found[name]), found
    for name, facts in found.items():
        assert int(facts[0].split()[1]) <= 227 << 10, (name, facts[0])  # bytes of shared memory


if __name__ == "__main__":
    print(json.dumps(compile_all()))
