"""Products of experts on Hopper: what can be said of CUDA C++ for it without one (kernels/bench/check_moe.py compares them with
fp64 there)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from k3kernels.moe import hopper
from k3kernels.nvrtc import CudaSource, compile_cubin

MAX_SHARED_BYTES = 227 << 10


def dumps(source: CudaSource, defines: dict[str, int], folder: Path) -> tuple[str, str]:
    """How much the kernel takes, and its instructions."""
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_cubin(source.path, "sm_90a", source.defines() | defines))

    def dump(what: str) -> str:
        command = [triton.knobs.nvidia.cuobjdump.path, what, cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return dump("-res-usage"), dump("-sass")


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("is_transposed", "is_gated"), [(False, False), (False, True), (True, False)])
def test_the_products_compile_spill_nothing_and_share_their_rows_in_a_cluster(
    is_packed: bool, is_transposed: bool, is_gated: bool, tmp_path: Path
) -> None:
    source = hopper.PRODUCT
    usage, instructions = dumps(source, dict(hopper.defines(is_packed, is_transposed, is_gated)), tmp_path)
    assert source.function in usage
    assert " STACK:0 " in usage
    assert f"HGMMA.64x{hopper.MAX_ROWS}x16" in instructions
    assert "MULTICAST" in instructions
    # A fence for the whole device in the loop over the depth would cost more than the products.
    loop = instructions[instructions.index("HGMMA") : instructions.rindex("HGMMA")]
    assert "MEMBAR" not in loop
    # The waits that are written, of each number of rows; a compiler that serialises waits for every product.
    assert instructions.count("WARPGROUP.DEPBAR") <= 6 * len(heights())
    assert source.shared_bytes <= MAX_SHARED_BYTES


def test_the_weights_gradient_compiles_spills_nothing_and_is_stored_by_tma(tmp_path: Path) -> None:
    source = hopper.WEIGHTS
    usage, instructions = dumps(source, {}, tmp_path)
    assert " STACK:0 " in usage
    assert "HGMMA.64x128x16" in instructions
    assert "UTMASTG" in instructions
    assert source.shared_bytes <= MAX_SHARED_BYTES


def test_matrices_that_are_not_on_hopper_are_left_to_the_grouped_kernels() -> None:
    assert not hopper.takes([torch.zeros(2, 512, 512, dtype=torch.bfloat16)])


def heights() -> list[int]:
    """The numbers of rows that the kernel has a case for, but for the largest's."""
    cases = re.findall(r"case (\d+): multiply_tile<\1>", hopper.PRODUCT.path.read_text())
    return [*map(int, cases), hopper.MAX_ROWS]


def test_every_number_of_rows_that_a_tile_is_rounded_to_has_its_case() -> None:
    assert heights() == [*range(32, 128, 32), *range(128, hopper.MAX_ROWS + 1, 16)]
