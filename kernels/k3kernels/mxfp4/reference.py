"""MXFP4 (OCP Microscaling Formats 1.0, sections 5.1 and 6.3) in the layout of compressed-tensors, on any device.

A row of n values is n/2 bytes and n/32 scale bytes. Byte j holds value 2j in its low nibble and 2j+1 in its high one.
A nibble is sign << 3 | index into GRID; scale byte s means 2^(s - 127), and 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

GROUP = 32
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_SCALE = 255

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of GRID
_PAIR_DTYPES = {torch.bfloat16: torch.int32, torch.float32: torch.int64}  # two values, as one number
_CHUNK = 1 << 15  # groups at a time: a million values, a few MiB of scratch memory for each step of the arithmetic


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scales of a tensor [..., n]. Raises ValueError where n is no multiple of 32."""
    *rows, n = shape
    if n % GROUP:
        raise ValueError(f"MXFP4 packs {GROUP} values along the last axis to a group: {list(shape)} has {n} there")
    return (*rows, n // 2), (*rows, n // GROUP)


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., n/2] and [..., n/32] uint8 to [..., n], exact in bfloat16, float32 and float64.

    A group of scale 255 is NaN; values of 2^128 and more, which only scales 253 and 254 can mean, are infinite in the
    first two. Raises ValueError for shapes or types that do not belong together, and for another dtype.
    """
    _require_packed(packed, scale)
    if dtype not in (*_PAIR_DTYPES, torch.float64):
        raise ValueError(
            f"MXFP4 is unpacked to bfloat16, float32 or float64, not {dtype}: it holds numbers out of its range"
        )
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    codes_GB, scales_G, out_GX = _in_groups(packed, GROUP // 2), scale.reshape(-1), _in_groups(out, GROUP)
    for rows in _chunks(scales_G.numel(), 16 * _CHUNK):
        torch.mul(_grid_values(codes_GB[rows], dtype), _powers(scales_G[rows], dtype).unsqueeze(1), out=out_GX[rows])
    return out


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] floating point to the codes [..., n/2] and scales [..., n/32], by the rule of compressed-tensors.

    The scale's exponent is floor(log2(a)) - 2, clamped to -127..127, with a the largest magnitude of the group, or the
    next power of two where a's mantissa is 1.75 or more: a then lies in 3.5..7 steps and loses at most a step in
    saturating at 6, where the floor rule of the OCP's text would take 7.9 to 6. Each value goes to the nearest point of the grid, ties to the even code, above 6 to 6.
    A group of zeros has scale byte 0. Signs are kept, of zeros too. Raises ValueError for values that are not finite.
    """
    return _pack(values, None)


def repack(values: Tensor, old_packed: Tensor, old_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `pack`, but bytes change only where values do: for a delta against the old bytes.

    A group whose values equal the old ones keeps its bytes. In any other group the old scale stays if all values are
    exact under it, and while the scale stays so does the nibble of every equal value (-0 equals 0). Old values are
    compared as unpacked in the values' dtype. Raises ValueError for values that are not finite in a group that changed.
    """
    _require_packed(old_packed, old_scale)
    if packed_shapes(tuple(values.shape)) != (tuple(old_packed.shape), tuple(old_scale.shape)):
        raise ValueError(
            f"values {list(values.shape)} were not packed to {list(old_packed.shape)}, {list(old_scale.shape)}"
        )
    return _pack(values, (old_packed, old_scale))


def _pack(values: Tensor, old: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    if not values.is_floating_point():
        raise ValueError(f"MXFP4 packs floating point values, not {values.dtype}")
    packed_shape, scale_shape = packed_shapes(tuple(values.shape))
    packed = torch.empty(packed_shape, dtype=torch.uint8, device=values.device)
    scale = torch.empty(scale_shape, dtype=torch.uint8, device=values.device)
    packed_GB, scale_G, values_GX = _in_groups(packed, GROUP // 2), scale.view(-1), _in_groups(values.detach(), GROUP)
    old_GB, old_G = (None, None) if old is None else (_in_groups(old[0], GROUP // 2), old[1].reshape(-1))
    for rows in _chunks(scale_G.numel(), _CHUNK):
        if old_GB is None or old_G is None:
            packed_GB[rows], scale_G[rows] = _pack_groups(values_GX[rows])
        else:
            packed_GB[rows], scale_G[rows] = _repack_groups(values_GX[rows], old_GB[rows], old_G[rows])
    return packed, scale


def _pack_groups(values_GX: Tensor) -> tuple[Tensor, Tensor]:
    wide_GX = values_GX.to(torch.promote_types(values_GX.dtype, torch.float32))
    largest_G = wide_GX.abs().amax(1)
    _require_finite(largest_G)
    scale_G = _scales(largest_G)
    return _pairs(_nearest_codes(wide_GX, scale_G)), scale_G


def _repack_groups(values_GX: Tensor, old_GB: Tensor, old_G: Tensor) -> tuple[Tensor, Tensor]:
    dtype = values_GX.dtype if values_GX.dtype in _PAIR_DTYPES else torch.float64
    equal_GX = unpack(old_GB, old_G.unsqueeze(1), dtype).to(values_GX.dtype) == values_GX
    (changed_H,) = torch.nonzero(~equal_GX.all(1), as_tuple=True)
    values_HX = values_GX[changed_H].to(torch.promote_types(values_GX.dtype, torch.float32))
    largest_H = values_HX.abs().amax(1)
    _require_finite(largest_H)
    old_H = old_G[changed_H]
    codes_HX = _nearest_codes(values_HX, old_H)
    is_exact_H = (unpack(_pairs(codes_HX), old_H.unsqueeze(1), values_HX.dtype) == values_HX).all(1)
    scale_H = torch.where(is_exact_H, old_H, _scales(largest_H))
    codes_HX = torch.where(is_exact_H.unsqueeze(1), codes_HX, _nearest_codes(values_HX, scale_H))
    stays_HX = equal_GX[changed_H] & (scale_H == old_H).unsqueeze(1)
    packed_GB, scale_G = old_GB.clone(), old_G.clone()
    packed_GB[changed_H] = _pairs(torch.where(stays_HX, _codes(old_GB[changed_H]), codes_HX))
    scale_G[changed_H] = scale_H
    return packed_GB, scale_G


def _scales(largest_G: Tensor) -> Tensor:
    """Scale bytes for groups of these largest magnitudes."""
    mantissa_G, exponent_G = torch.frexp(largest_G)  # mantissa in 0.5..1
    exponent_G = exponent_G - 3 + (mantissa_G >= 0.875)
    return torch.where(largest_G > 0, exponent_G.clamp(-127, 127) + 127, 0).to(torch.uint8)


def _nearest_codes(wide_GX: Tensor, scale_G: Tensor) -> Tensor:
    """Nibbles, one a byte. A power of two divides exactly, but for results so small that the nearest point is 0."""
    inverse_G = _powers(2 * 127 - scale_G, wide_GX.dtype)  # 255 again for 255
    size_GX = (wide_GX * inverse_G.unsqueeze(1)).abs_()
    codes_GX = torch.signbit(wide_GX).to(torch.uint8) << 3
    for index, midpoint in enumerate(_MIDPOINTS):  # a tie goes to the even one of index and index + 1
        codes_GX += size_GX > midpoint if index % 2 == 0 else size_GX >= midpoint
    return codes_GX


def _codes(packed_GB: Tensor) -> Tensor:
    return torch.stack([packed_GB & 15, packed_GB >> 4], -1).flatten(-2)


def _pairs(codes_GX: Tensor) -> Tensor:
    return codes_GX[:, 0::2] | codes_GX[:, 1::2] << 4


def _grid_values(packed_GB: Tensor, dtype: torch.dtype) -> Tensor:
    """Values before scaling, [groups, 32]: one look-up a byte gives both of its values."""
    pair = _PAIR_DTYPES.get(dtype)
    if pair is None:
        return _grid_of_codes(dtype, packed_GB.device)[_codes(packed_GB).int()]
    table = _grid_of_bytes(dtype, packed_GB.device)
    return table.index_select(0, packed_GB.reshape(-1).int()).view(dtype).view(-1, GROUP)


def _powers(scale_G: Tensor, dtype: torch.dtype) -> Tensor:
    return _power_of_scales(dtype, scale_G.device).index_select(0, scale_G.int())


@cache
def _grid_of_codes(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([*GRID, *(-value for value in GRID)], dtype=dtype, device=device)


@cache
def _grid_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each of the 256 bytes its two values, as one number of twice their width."""
    bytes_256 = torch.arange(256, dtype=torch.uint8, device=device).view(-1, 1)
    return _grid_of_codes(dtype, device)[_codes(bytes_256).int()].view(_PAIR_DTYPES[dtype]).squeeze(1)


@cache
def _power_of_scales(dtype: torch.dtype, device: torch.device) -> Tensor:
    powers = [*(2.0 ** (s - 127) for s in range(NAN_SCALE)), float("nan")]
    return torch.tensor(powers, dtype=torch.float64, device=device).to(dtype)


def _in_groups(tensor: Tensor, size: int) -> Tensor:
    return tensor.reshape(-1, size)


def _chunks(num_groups: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_groups, size))


def _require_packed(packed: Tensor, scale: Tensor) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes and scales are uint8, got {packed.dtype} and {scale.dtype}")
    if tuple(scale.shape) != (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP) or packed.shape[-1] * 2 % GROUP:
        raise ValueError(
            f"MXFP4 has one scale for {GROUP // 2} bytes of codes, got {list(packed.shape)} and {list(scale.shape)}"
        )


def _require_finite(largest_G: Tensor) -> None:
    if not bool(torch.isfinite(largest_G).all()):
        raise ValueError("MXFP4 holds finite values only: a group to be packed has NaN or infinity in it")
