"""The fused kernel against its definition, and the definition against numpy and the delta codec. Equality throughout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3core.checkpoint.delta import encode_delta
from k3core.checkpoint.tensors import RawTensor
from k3kernels.xor_compact import Compacted, changed_elements, reference, xor_compact
from k3kernels.xor_compact import triton as fused
from k3kernels.xor_compact.triton import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
SMALL = Tile(block=256)
WIDTHS = [1, 2, 4]


def make_pair(num_elements: int, width: int, density: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (2 * num_elements * width,), dtype=torch.uint8, generator=gen)
    base, other = raw.view(reference.SIGNED[width]).reshape(2, num_elements)
    new = torch.where(torch.rand(num_elements, generator=gen) < density, other, base)
    return base.view(reference.PATTERNS[width]).to(DEVICE), new.view(reference.PATTERNS[width]).to(DEVICE)


def as_numpy(result: Compacted) -> dict[str, np.ndarray | int]:
    assert result.positions_N is not None
    assert result.values_N is not None
    return {
        "num_elements": result.num_elements,
        "block": result.block,
        "counts_B": result.counts_B.cpu().numpy(),
        "positions_N": result.positions_N.cpu().numpy(),
        "values_N": result.values_N.cpu().numpy(),
    }


def assert_same(got: Compacted, want: Compacted) -> None:
    for name, value in as_numpy(want).items():
        np.testing.assert_array_equal(as_numpy(got)[name], value, err_msg=name, strict=not isinstance(value, int))


def run_both(base: Tensor, new: Tensor, tile: Tile = SMALL) -> Compacted:
    got = fused.xor_compact(base, new, new.numel(), tile)
    assert_same(got, reference.xor_compact(base.cpu(), new.cpu(), new.numel(), tile.block))
    return got


def order(unordered: fused.Unordered) -> tuple[Tensor, Tensor]:
    starts_B = fused.block_starts(unordered.counts_B)
    return fused.order_blocks(unordered, starts_B, int(unordered.cursor), torch.uint16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_elements", [1, 7, 63, 65, 255, 256, 257])
def test_the_kernel_equals_its_definition_off_the_block_size(num_elements, width):
    run_both(*make_pair(num_elements, width, 0.1))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_tensor_may_change_everywhere(width):
    base, _ = make_pair(300, width, 0.0)
    new = torch.from_numpy(~base.cpu().numpy()).to(DEVICE)
    assert run_both(base, new).num_changed == 300


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [-1, 1])
def test_the_default_tiles_equal_the_definition(width, offset):
    tile = fused.TILES[width]
    run_both(*make_pair(tile.block + offset, width, 0.05), tile)


@pytest.mark.parametrize(
    ("width", "tile"),
    [
        (1, Tile(block=1024, pieces=1)),
        (2, Tile(block=512, pieces=1)),
        (2, Tile(block=1024, pieces=4)),
        (2, Tile(block=512, num_warps=1)),
        (4, Tile(block=512, pieces=4)),
        (4, Tile(block=256, num_warps=8)),
    ],
)
def test_no_way_to_cut_the_work_changes_the_result(width, tile):
    run_both(*make_pair(2 * tile.block + 77, width, 0.2), tile)


@pytest.mark.parametrize("width", WIDTHS)
def test_unchanged_and_empty_tensors_have_no_changes(width):
    for num_elements in (0, 300):
        base, _ = make_pair(num_elements, width, 0.0)
        assert run_both(base, base.clone()).num_changed == 0


def test_a_tensor_that_starts_off_the_load_boundary_is_read_right():
    base, new = make_pair(300, 2, 0.1)
    run_both(base[1:], new[1:])
    run_both(base[8:], new[:-8])
    run_both(base[:-3], new[3:])


@given(
    width=st.sampled_from(WIDTHS),
    num_elements=st.integers(0, 300),
    changes=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 2**32 - 1)), max_size=40),
    seed=st.integers(0, 9),
)
@example(width=2, num_elements=257, changes=[(256, 0x8000), (0, 1), (255, 0xFFFF)], seed=0)
@settings(max_examples=15)
def test_scattering_the_changes_over_the_base_gives_the_new_tensor(width, num_elements, changes, seed):
    base, _ = make_pair(num_elements, width, 0.0, seed)
    words = base.cpu().numpy().copy()
    for position, value in changes:
        if position < num_elements:
            words[position] ^= value & (2 ** (8 * width) - 1)
    new = torch.from_numpy(words).to(DEVICE)
    positions_N, values_N = changed_elements(run_both(base, new))
    rebuilt = base.cpu().numpy().copy()
    rebuilt[positions_N.cpu().numpy()] ^= values_N.cpu().numpy()
    np.testing.assert_array_equal(rebuilt, words)


def test_nan_payloads_and_the_sign_of_zero_are_changes():
    base = torch.tensor([0x0000, 0x7FC0, 0x3F80, 0x7FC1, 0x8000], dtype=torch.int32).to(torch.int16)
    new = torch.tensor([0x8000, 0x7FC1, 0x3F80, 0x7FC1, 0x8000], dtype=torch.int32).to(torch.int16)
    base, new = (pattern.view(torch.bfloat16).to(DEVICE) for pattern in (base, new))
    positions_N, values_N = changed_elements(xor_compact(base, new, 1.0))
    assert positions_N.tolist() == [0, 1]
    assert values_N.tolist() == [0x8000, 0x0001]
    run_both(reference.as_patterns(base), reference.as_patterns(new))


def test_more_changes_than_the_capacity_are_counted_and_not_kept():
    base, new = make_pair(500, 2, 0.2)
    want = reference.xor_compact(base.cpu(), new.cpu(), 500, 256)
    exact = fused.xor_compact(base, new, want.num_changed, SMALL)
    assert_same(exact, want)
    for result in (
        fused.xor_compact(base, new, want.num_changed - 1, SMALL),
        fused.xor_compact(base, new, 0, SMALL),
        reference.xor_compact(base.cpu(), new.cpu(), want.num_changed - 1, 256),
    ):
        assert (result.positions_N, result.values_N) == (None, None)
        assert result.counts_B.tolist() == want.counts_B.tolist()
        with pytest.raises(ValueError, match="elements changed, more than the capacity: store the whole XOR"):
            changed_elements(result)


def test_nothing_is_written_beyond_the_capacity():
    base, new = make_pair(1024, 2, 0.5)
    memory = torch.full((1024,), -1, dtype=torch.int32, device=DEVICE)
    unordered = dataclasses.replace(fused.empty_blocks(4, 0, 2, DEVICE), records=memory[:300])
    fused.launch(base, new, unordered, slice(0, 4), SMALL)
    assert int(unordered.cursor) == reference.xor_compact(base.cpu(), new.cpu(), 1024, 256).num_changed > 300
    assert (memory[300:] == -1).all()


def test_the_order_in_which_blocks_finish_does_not_show():
    base, new = make_pair(1280, 2, 0.1)
    unordered = fused.empty_blocks(5, 1280, 2, DEVICE)
    for block in (3, 0, 4, 2, 1):
        part = slice(256 * block, 256 * (block + 1))
        fused.launch(base[part], new[part], unordered, slice(block, block + 1), SMALL)
    assert unordered.offsets_B.tolist() != sorted(unordered.offsets_B.tolist())
    positions_N, values_N = order(unordered)
    assert int(unordered.mismatches) == 0
    assert_same(Compacted(1280, 256, unordered.counts_B, positions_N, values_N), run_both(base, new))


def test_records_that_do_not_make_up_the_xor_are_noticed():
    base, new = make_pair(1024, 2, 0.1)
    unordered = fused.compact_blocks(base, new, 1024, SMALL)
    unordered.records[int(unordered.offsets_B[2])] ^= 1 << 20
    order(unordered)
    assert int(unordered.mismatches) == 1


def test_the_public_function_takes_any_dtype_of_1_2_or_4_bytes():
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        width = dtype.itemsize
        base, new = (pattern.view(dtype) for pattern in make_pair(20_000, width, 0.05))
        result = xor_compact(base.reshape(100, 200), new.reshape(100, 200))
        assert result.block == fused.TILES[width].block
        want = reference.xor_compact(
            reference.as_patterns(base).cpu(), reference.as_patterns(new).cpu(), 20_000, result.block
        )
        assert_same(result, want)


def test_the_codec_finds_the_same_positions_and_values():
    base, new = make_pair(20_000, 2, 0.03)
    raw_base, raw_new = base.cpu().numpy(), new.cpu().numpy()
    xor = raw_base ^ raw_new
    positions_N, values_N = changed_elements(xor_compact(base.view(torch.bfloat16), new.view(torch.bfloat16)).to("cpu"))
    np.testing.assert_array_equal(positions_N.numpy(), np.flatnonzero(xor), strict=True)
    np.testing.assert_array_equal(values_N.numpy(), xor[xor != 0], strict=True)
    parent, child = ({"w": RawTensor("BF16", (20_000,), raw.tobytes())} for raw in (raw_base, raw_new))
    _, (entry,) = encode_delta(parent, child)
    assert entry.num_changed == positions_N.numel()


def test_tensors_that_are_not_alike_or_not_contiguous_are_refused():
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"two tensors alike, got torch\.bfloat16"):
        xor_compact(x, x.to(torch.float16))
    with pytest.raises(ValueError, match="two tensors alike"):
        xor_compact(x, x[:2])
    with pytest.raises(ValueError, match=r"pass tensor\.contiguous"):
        xor_compact(x.T, x.T)
    with pytest.raises(ValueError, match=r"elements of 1, 2 or 4 bytes, got torch\.float64"):
        xor_compact(x.double(), x.double())
    with pytest.raises(ValueError, match=r"capacity_fraction must lie in 0\.\.1, got 2"):
        xor_compact(x, x, 2)
