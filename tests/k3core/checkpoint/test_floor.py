import math

import numpy as np
import pytest

from k3core.checkpoint.floor import Floor, entropy_floor
from k3core.checkpoint.tensors import RawTensor


def xor_of(values: list[int], dtype: str, width: int) -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    new = np.array(values, f"<u{width}")
    return (
        {"w": RawTensor(dtype, new.shape, bytes(new.nbytes))},
        {"w": RawTensor(dtype, new.shape, new.tobytes())},
    )


def test_positions_and_values_are_worked_by_hand() -> None:
    # 4 of 16 changed: h2(1/4) = 2 - 3/4 log2(3). Values 1, 1, 1, 0x101: h2(1/4) again.
    floor = entropy_floor(*xor_of([1, 1, 1, 0x101] + 12 * [0], "BF16", 2))
    h2 = 2 - 0.75 * math.log2(3)
    assert floor.positions_bytes == pytest.approx(16 * h2 / 8)
    assert floor.values_bytes == pytest.approx(4 * h2 / 8)
    assert floor.total_bytes == floor.positions_bytes + floor.values_bytes


def test_values_of_wide_elements_are_taken_by_byte_plane() -> None:
    # Whole values all differ (2 bits each); of the planes, two take a bit each and two are constant.
    floor = entropy_floor(*xor_of([0x0101, 0x0102, 0x0201, 0x0202], "F32", 4))
    assert floor == Floor(0.0, 4 * 2 / 8)


def test_what_did_not_change_or_is_empty_costs_nothing() -> None:
    assert entropy_floor(*xor_of(100 * [0], "BF16", 2)) == Floor(0.0, 0.0)
    assert entropy_floor(*xor_of([], "BF16", 2)) == Floor(0.0, 0.0)
    assert entropy_floor(*xor_of(100 * [7], "BF16", 2)) == Floor(0.0, 0.0)


def test_tensors_are_summed() -> None:
    parent, new = xor_of([1, 2, 0, 0], "BF16", 2)
    one = entropy_floor(parent, new)
    two = entropy_floor({"a": parent["w"], "b": parent["w"]}, {"a": new["w"], "b": new["w"]})
    assert two.total_bytes == pytest.approx(2 * one.total_bytes)
