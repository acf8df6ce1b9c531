"""MXFP4 against an oracle of its own: one value at a time, in Python's floats, by search over the grid."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3kernels.mxfp4 import GROUP, pack, packed_shapes, repack, unpack

ORACLE_GRID = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def oracle_value(code: int, scale: int) -> float:
    return math.copysign(math.ldexp(ORACLE_GRID[code & 7], scale - 127), -1.0 if code & 8 else 1.0)


def oracle_scale(group: list[float]) -> int:
    largest = max(abs(value) for value in group)
    if largest == 0:
        return 0
    exponent = -1200
    while math.ldexp(1.0, exponent + 1) <= largest:
        exponent += 1
    if largest >= math.ldexp(1.75, exponent):
        exponent += 1
    return min(max(exponent - 2, -127), 127) + 127


def oracle_code(value: float, scale: int) -> int:
    distances = {code: abs(abs(value) - oracle_value(code, scale)) for code in ORACLE_GRID}
    nearest = [code for code, distance in distances.items() if distance == min(distances.values())]
    code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


def oracle_pack(values: list[float]) -> tuple[list[int], list[int]]:
    codes, scales = [], []
    for start in range(0, len(values), 32):
        group = values[start : start + 32]
        scales.append(oracle_scale(group))
        codes += [oracle_code(value, scales[-1]) for value in group]
    return [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)], scales


def as_bytes(codes: Tensor) -> Tensor:
    """[..., n] nibbles to [..., n/2] bytes."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def bits(values: Tensor) -> Tensor:
    """So that -0 differs from 0."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def random_blocks(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks whose largest code is each of 1..7 equally often, at scales that leave room on both sides."""
    generator = torch.Generator().manual_seed(seed)
    largest = torch.randint(1, 8, (num, 1), generator=generator)
    sizes = (torch.rand(num, 32, generator=generator) * (largest + 1)).floor().long()
    sizes[:, 11:12] = largest
    codes = sizes | torch.randint(0, 2, (num, 32), generator=generator) << 3
    return as_bytes(codes), torch.randint(10, 240, (num, 1), generator=generator).to(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_every_scale_has_its_exact_value(dtype: torch.dtype) -> None:
    codes = torch.arange(32).remainder(16).expand(255, 32)
    got = unpack(as_bytes(codes), torch.arange(255, dtype=torch.uint8).unsqueeze(1), dtype)
    want = torch.tensor([[oracle_value(c, s) for c in codes[s].tolist()] for s in range(255)], dtype=torch.float64)
    representable = want.abs() <= torch.finfo(dtype).max
    assert torch.equal(bits(got), bits(want.to(dtype)))
    assert torch.equal(got.double()[representable], want[representable])
    assert representable[:253].all(), "only scales 253 and 254 reach beyond fp32"


def test_scale_255_is_nan_and_touches_no_other_group() -> None:
    values = unpack(
        torch.full((2, 32), 0x21, dtype=torch.uint8), torch.tensor([[127, 255], [127, 127]]).byte(), torch.bfloat16
    )
    assert values[0, 32:].isnan().all()
    assert not values[0, :32].isnan().any()
    assert not values[1].isnan().any()


def test_the_low_nibble_comes_first_and_the_scale_belongs_to_32_inputs() -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0], packed[0, 16] = 0x72, 0xA1
    values = unpack(packed, torch.tensor([[128, 126]]).byte(), torch.float32)
    assert values[0, [0, 1, 32, 33]].tolist() == [2.0, 12.0, 0.25, -0.5]
    assert values.count_nonzero() == 4


def test_packing_agrees_with_the_oracle_on_random_values_of_all_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.randint(-135, 127, (200, 2, 1), generator=generator).double()
    spread = torch.randint(-6, 1, (200, 2, 32), generator=generator).double()
    for dtype in (torch.bfloat16, torch.float32):
        values = (
            (torch.randn(200, 2, 32, generator=generator).clamp(-2, 2) / 2 * (size + spread).exp2())
            .to(dtype)
            .view(200, 64)
        )
        packed, scale = pack(values)
        want_packed, want_scale = oracle_pack(values.double().flatten().tolist())
        assert scale.flatten().tolist() == want_scale
        assert packed.flatten().tolist() == want_packed


@pytest.mark.parametrize("exponent", [-133, -126, -20, 0, 5, 120])
def test_ties_go_to_the_even_code_and_what_is_above_the_grid_saturates(exponent: int) -> None:
    eighths = [math.ldexp(n, exponent - 3) for n in range(64)]  # every multiple of 1/8 below 8, each tie among them
    values = torch.tensor(
        [[7.0 * 2.0**exponent, *eighths[start : start + 31]] for start in (0, 31)], dtype=torch.float32
    )
    signed = torch.cat([values, -values])
    packed, scale = pack(signed)
    want_packed, want_scale = oracle_pack(signed.double().flatten().tolist())
    assert (packed.flatten().tolist(), scale.flatten().tolist()) == (want_packed, want_scale)
    if exponent == 0:
        by_hand = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 7.0: 7}
        codes = {v: oracle_code(v, 127) for v in by_hand}
        assert codes == by_hand


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_finite_group_packs_as_the_oracle_says(group: list[float]) -> None:
    packed, scale = pack(torch.tensor([group], dtype=torch.float32))
    assert (packed.tolist(), scale.tolist()) == tuple([part] for part in oracle_pack(group))


def test_a_group_of_zeros_has_scale_byte_0_and_keeps_its_signs() -> None:
    packed, scale = pack(torch.tensor([[0.0, -0.0] * 16]))
    assert scale.tolist() == [[0]]
    assert packed.tolist() == [[0x80] * 16]


def test_packing_what_was_unpacked_gives_the_same_values() -> None:
    packed, scale = random_blocks(2000)
    for dtype in DTYPES:
        values = unpack(packed, scale, dtype)
        assert torch.equal(bits(unpack(*pack(values), dtype)), bits(values))


def test_without_the_old_bytes_29_percent_of_random_blocks_come_back_as_they_were_and_with_them_all_do() -> None:
    packed, scale = random_blocks(20_000)
    for dtype in (torch.bfloat16, torch.float32):
        values = unpack(packed, scale, dtype)
        fresh_packed, fresh_scale = pack(values)
        same = ((fresh_packed == packed).all(1) & (fresh_scale == scale).all(1)).double().mean()
        assert same == pytest.approx(2 / 7, abs=0.01), "those whose largest value is 4 or 6"
        again = repack(values, packed, scale)
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scale)


def test_a_value_that_changes_under_its_scale_changes_one_nibble() -> None:
    packed, scale = random_blocks(500)
    values = unpack(packed, scale, torch.bfloat16)
    row = torch.arange(500)
    column = torch.randint(0, 32, (500,), generator=torch.Generator().manual_seed(2))
    values[row, column] = torch.where(values[row, column] == 0, values.abs().amax(1), 0)
    new_packed, new_scale = repack(values, packed, scale)
    assert torch.equal(new_scale, scale)
    assert torch.equal(unpack(new_packed, new_scale, torch.bfloat16), values)
    changed = new_packed != packed
    assert changed.sum() == 500
    assert torch.equal(changed.nonzero()[:, 1], column // 2)
    other = torch.where(column % 2 == 0, 0xF0, 0x0F)
    assert torch.equal(new_packed[row, column // 2] & other, packed[row, column // 2] & other)


def test_zeros_keep_the_sign_of_their_code_whatever_the_sign_of_the_value() -> None:
    codes = torch.tensor([[0, 8] * 15 + [3, 2]])
    packed, scale = as_bytes(codes), torch.tensor([[127]]).byte()
    values = -unpack(packed, scale, torch.float32)
    values[0, 30:] = torch.tensor([1.5, -1.0])  # the last one changed
    new_packed, _ = repack(values, packed, scale)
    assert torch.equal(new_packed, as_bytes(torch.tensor([[0, 8] * 15 + [3, 2 | 8]])))


def test_a_value_that_the_old_scale_cannot_hold_packs_its_group_afresh_and_no_other() -> None:
    packed, scale = random_blocks(300)
    packed, scale = packed.view(100, 48), scale.view(100, 3)
    values = unpack(packed, scale, torch.float32)
    values[7, 40] *= 1.001
    values[7, 40] += values[7, 32:64].abs().max() / 999
    new_packed, new_scale = repack(values, packed, scale)
    fresh_packed, fresh_scale = pack(values)
    assert torch.equal(new_scale[7, 1], fresh_scale[7, 1])
    assert torch.equal(new_packed[7, 16:32], fresh_packed[7, 16:32])
    untouched = torch.ones_like(scale, dtype=torch.bool)
    untouched[7, 1] = False
    assert torch.equal(new_scale[untouched], scale[untouched])
    untouched_bytes = untouched.repeat_interleave(16, 1)
    assert torch.equal(new_packed[untouched_bytes], packed[untouched_bytes])


@given(st.data())
def test_repacking_is_exact_where_the_values_are_and_else_rounds_as_packing_does(data: st.DataObject) -> None:
    """Against the rule said group by group, after random edits: exact moves on the grid, and moves off it."""
    packed, scale = random_blocks(8, data.draw(st.integers(0, 1000)))
    values = unpack(packed, scale, torch.float32)
    unit = torch.ldexp(torch.ones(8), scale[:, 0].int() - 127)
    for row in range(8):
        for _ in range(data.draw(st.integers(0, 3))):
            step = data.draw(st.sampled_from([0.5, 1.0, -1.5, 6.0, 8.0, 0.3, 100.0, -0.0]))
            values[row, data.draw(st.integers(0, 31))] = step * unit[row]
    new_packed, new_scale = repack(values, packed, scale)
    fresh_packed, fresh_scale = pack(values)
    old = unpack(packed, scale, torch.float32)
    for row in range(8):
        s = int(scale[row])
        if torch.equal(old[row], values[row]):
            assert torch.equal(new_packed[row], packed[row])
            assert new_scale[row] == s
        elif all(oracle_value(oracle_code(v, s), s) == v for v in values[row].tolist()):
            assert new_scale[row] == s
            assert torch.equal(unpack(new_packed, new_scale, torch.float32)[row], values[row])
        else:
            assert new_scale[row] == fresh_scale[row]
            got, want = (unpack(p, fresh_scale, torch.float32)[row] for p in (new_packed, fresh_packed))
            assert torch.equal(got, want)


def test_large_tensors_are_packed_in_pieces_with_the_same_result() -> None:
    values = torch.randn(40, 1024, 32, generator=torch.Generator().manual_seed(0))  # more groups than one piece holds
    packed, scale = pack(values)
    for row in (0, 31, 32, 39):
        assert all(torch.equal(a[row], b) for a, b in zip((packed, scale), pack(values[row]), strict=True))
    changed = values.clone()
    changed[33, 5] = 0
    again = repack(unpack(packed, scale, torch.float32), packed, scale)
    assert all(torch.equal(a, b) for a, b in zip(again, (packed, scale), strict=True))


def test_what_cannot_be_packed_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"32 values along the last axis.*\[4, 48\] has 48"):
        pack(torch.zeros(4, 48))
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            pack(torch.tensor([value] + [1.0] * 31))
    with pytest.raises(ValueError, match=r"not torch\.int32"):
        pack(torch.zeros(32, dtype=torch.int32))
    packed, scale = pack(torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        unpack(packed, scale, torch.float16)
    with pytest.raises(ValueError, match=r"one scale for 16 bytes of codes, got \[2, 32\] and \[2, 1\]"):
        unpack(packed, scale[:, :1], torch.float32)
    with pytest.raises(ValueError, match="uint8"):
        unpack(packed, scale.int(), torch.float32)
    with pytest.raises(ValueError, match=r"values \[2, 32\] were not packed to \[2, 32\]"):
        repack(torch.zeros(2, GROUP), packed, scale)


def test_shapes_are_known_without_packing() -> None:
    packed, scale = pack(torch.zeros(3, 5, 96))
    assert packed_shapes((3, 5, 96)) == (tuple(packed.shape), tuple(scale.shape)) == ((3, 5, 48), (3, 5, 3))
