"""Products of rows sorted by expert with each expert's matrix, in Triton. `grouped.py` launches them.

Tiles come through the tensor memory accelerator. Rows' tiles may read on into the next expert's rows, which is harmless
where a row is a result's row: those are not stored. Where rows are summed over (the weights' gradients), the last, partial
step is loaded under a mask instead. A product's K sums have one order, set by K alone.

The activation costs a GPU's special function unit as much as its tensor cores give it time for: outside fp32, tanh and
sigmoid of one element come out of one quotient (`_quick_factors`), exact to 1e-7 of their largest value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.triton import _add_products, _round_to
from k3kernels.situ.formulas import _activated, _activation_gradients

# What a program is told of a tile: expert, first tile and number of tiles of its band, the band's first row.
FIELDS = 4


@triton.jit
def tiles_kernel(  # type: ignore[no-untyped-def]
    edges_ptr,
    tiles_ptr,
    max_tiles,
    E: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BAND: tl.constexpr,
    BT: tl.constexpr,
):
    """Record 0 holds the number of tiles of BM rows; record i + 1 describes tile i. A band is BAND tiles of one expert."""
    groups = tl.arange(0, BE)
    begins = tl.load(edges_ptr + groups, mask=groups < E, other=0)
    ends = tl.load(edges_ptr + groups + 1, mask=groups < E, other=0)
    counts = (ends - begins + BM - 1) // BM
    lasts = tl.cumsum(counts, 0)
    tiles = tl.program_id(0) * BT + tl.arange(0, BT)
    experts = tl.sum(((lasts[None, :] <= tiles[:, None]) & (groups < E)[None, :]).to(tl.int32), 1)
    is_it = groups[None, :] == experts[:, None]
    first = tl.sum(tl.where(is_it, (lasts - counts)[None, :], 0), 1)
    begin = tl.sum(tl.where(is_it, begins[None, :], 0), 1)
    count = tl.sum(tl.where(is_it, counts[None, :], 0), 1)
    before = (tiles - first) // BAND * BAND
    records = tiles_ptr + (tiles + 1) * 4
    is_in = tiles < max_tiles
    tl.store(records, experts, mask=is_in)
    tl.store(records + 1, first + before, mask=is_in)
    tl.store(records + 2, tl.minimum(count - before, BAND), mask=is_in)
    tl.store(records + 3, begin + before * BM, mask=is_in)
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr, tl.sum(counts, 0))


@triton.jit
def _place(tiles_ptr, edges_ptr, work, num_n, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first row, last + 1, block of columns). A band's tiles take turns at each block of columns."""
    record = tiles_ptr + (work // num_n + 1) * 4
    expert = tl.load(record)
    band = tl.load(record + 1)
    size = tl.load(record + 2)
    inside = work - band * num_n
    row = tl.load(record + 3) + inside % size * BM
    return expert, row, tl.load(edges_ptr + expert + 1), inside // size


@triton.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """The left and the right half of the columns."""
    parts = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def _quarters(x):  # type: ignore[no-untyped-def]
    left, right = _halves(x)
    a, b = _halves(left)
    c, d = _halves(right)
    return a, b, c, d


@triton.jit
def _store(y_ptr, y, row, end, column, N, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """y's rows before `end` to y_ptr [., N]."""
    rows = row + tl.arange(0, y.shape[0])
    columns = column + tl.arange(0, y.shape[1])
    rounded = y if y.dtype == y_ptr.dtype.element_ty else _round_to(y, y_ptr.dtype.element_ty, INTERPRETED)
    is_in = (rows < end)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], rounded, mask=is_in)


@triton.jit
def _load(y_ptr, row, end, column, N, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    is_in = (rows < end)[:, None] & (columns < N)[None, :]
    return tl.load(y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=is_in, other=0.0)


@triton.jit
def _scaled(sums, x_scale_ptr, w_scale_ptr, row, end, expert, column, N):  # type: ignore[no-untyped-def]
    """sums times the scale of their row, if it has one, and that of their column."""
    columns = column + tl.arange(0, sums.shape[1])
    w_scale = tl.load(w_scale_ptr + expert * N + columns, mask=columns < N, other=0.0)
    if x_scale_ptr is not None:
        rows = row + tl.arange(0, sums.shape[0])
        sums = sums * tl.load(x_scale_ptr + rows, mask=rows < end, other=0.0)[:, None]
    return sums * w_scale[None, :]


@triton.jit
def _finish_gated(  # type: ignore[no-untyped-def]
    gate,
    up,
    gate_ptr,
    up_ptr,
    h_ptr,
    row,
    end,
    column,
    F,
    beta,
    linear_beta,
    KIND: tl.constexpr,
    KEEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    gate = _round_to(gate, dtype, INTERPRETED)
    up = _round_to(up, dtype, INTERPRETED)
    if KEEPS:
        _store(gate_ptr, gate, row, end, column, F, INTERPRETED)
        _store(up_ptr, up, row, end, column, F, INTERPRETED)
    h = _activated(gate.to(tl.float32), up.to(tl.float32), beta, linear_beta, KIND, dtype, INTERPRETED)
    _store(h_ptr, h, row, end, column, F, INTERPRETED)


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gated_rows_kernel(  # type: ignore[no-untyped-def]
    x_desc,
    w1_desc,
    w3_desc,
    gate_ptr,
    up_ptr,
    h_ptr,
    tiles_ptr,
    edges_ptr,
    F,
    R,
    beta,
    linear_beta,
    KIND: tl.constexpr,
    KEEPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = act(w1_e x, w3_e x) of sorted rows, and where KEEPS gate and up. The matrices are [E F, R], x [P, R]."""
    num_n = tl.cdiv(F, BN)
    num_work = tl.load(tiles_ptr) * num_n
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, block = _place(tiles_ptr, edges_ptr, work, num_n, BM)
        column = block * BN
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k in range(0, R, BK):
            x = x_desc.load([row, k])
            gate = _add_products(x, w1_desc.load([expert * F + column, k]).T, gate, INTERPRETED)
            up = _add_products(x, w3_desc.load([expert * F + column, k]).T, up, INTERPRETED)
        gate_0, gate_1 = _halves(gate)
        up_0, up_1 = _halves(up)
        ptrs = gate_ptr, up_ptr, h_ptr
        middle = column + BN // 2
        _finish_gated(gate_0, up_0, *ptrs, row, end, column, F, beta, linear_beta, KIND, KEEPS, INTERPRETED)
        _finish_gated(gate_1, up_1, *ptrs, row, end, middle, F, beta, linear_beta, KIND, KEEPS, INTERPRETED)


@triton.jit
def _rows_product(  # type: ignore[no-untyped-def]
    x_desc,
    w_desc,
    sums,
    row,
    first,
    column,
    K,
    BK: tl.constexpr,
    OUTER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """sums + x w_e^T, or where OUTER + x w_e; the matrix begins at row `first` of [E N, K], where OUTER [E K, N]."""
    for k in range(0, K, BK):
        x = x_desc.load([row, k])
        w = w_desc.load([first + k, column]) if OUTER else w_desc.load([first + column, k]).T
        sums = _add_products(x, w, sums, INTERPRETED)
    return sums


@triton.jit
def rows_product_kernel(  # type: ignore[no-untyped-def]
    x_desc,
    w_desc,
    x2_desc,
    w2_desc,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    tiles_ptr,
    edges_ptr,
    N,
    K,
    TWO: tl.constexpr,
    OUTER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y [P, N] = x w_e^T of sorted rows, or where OUTER x w_e; where TWO plus the same of x2 and w2, in the same sum.

    Scales (of fp8; else None): of rows [P] (or None), of the matrices' rows [E N].
    """
    num_n = tl.cdiv(N, BN)
    num_work = tl.load(tiles_ptr) * num_n
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, block = _place(tiles_ptr, edges_ptr, work, num_n, BM)
        column = block * BN
        first = expert * (K if OUTER else N)
        sums = tl.zeros([BM, BN], tl.float32)
        sums = _rows_product(x_desc, w_desc, sums, row, first, column, K, BK, OUTER, INTERPRETED)
        if TWO:
            sums = _rows_product(x2_desc, w2_desc, sums, row, first, column, K, BK, OUTER, INTERPRETED)
        if w_scale_ptr is not None:
            sums = _scaled(sums, x_scale_ptr, w_scale_ptr, row, end, expert, column, N)
        _store(y_ptr, sums, row, end, column, N, INTERPRETED)


@triton.jit
def _finish_hidden(  # type: ignore[no-untyped-def]
    grad,
    weights_ptr,
    order_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    h_ptr,
    row,
    end,
    column,
    F,
    beta,
    linear_beta,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """grad is of the unweighted result. Returns h . grad of each row, whose sum over columns is its weight's gradient."""
    BM: tl.constexpr = grad.shape[0]
    BN: tl.constexpr = grad.shape[1]
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    rows = row + tl.arange(0, BM)
    pairs = tl.load(order_ptr + rows, mask=rows < end, other=0)
    weight = tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    gate = _load(gate_ptr, row, end, column, F, BM, BN).to(tl.float32)
    up = _load(up_ptr, row, end, column, F, BM, BN).to(tl.float32)
    h, grad_gate, grad_up = _activation_gradients(grad, gate, up, beta, linear_beta, KIND, dtype, INTERPRETED)
    _store(grad_gate_ptr, grad_gate * weight, row, end, column, F, INTERPRETED)
    _store(grad_up_ptr, grad_up * weight, row, end, column, F, INTERPRETED)
    _store(h_ptr, h * weight, row, end, column, F, INTERPRETED)
    h = _round_to(h, dtype, INTERPRETED).to(tl.float32)
    is_in = (column + tl.arange(0, BN) < F)[None, :]
    return tl.sum(tl.where(is_in, h * grad, 0.0), 1)


@triton.jit
def weights_gradient_kernel(  # type: ignore[no-untyped-def]
    y_desc,
    x_desc,
    y_ptr,
    x_ptr,
    out_ptr,
    edges_ptr,
    N,
    K,
    E: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out_e [N, K] = the sum over expert e's rows of y^T x; zeros where it has none."""
    num_m, num_n = tl.cdiv(N, BM), tl.cdiv(K, BN)
    for work in tl.range(tl.program_id(0), E * num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        expert = work // (num_m * num_n)
        begin = tl.load(edges_ptr + expert)
        end = tl.load(edges_ptr + expert + 1)
        inside = work % (num_m * num_n)
        band = inside // (BAND * num_n)
        size = min(num_m - band * BAND, BAND)
        inside = inside - band * BAND * num_n
        m = (band * BAND + inside % size) * BM
        n = inside // size * BN
        sums = tl.zeros([BM, BN], tl.float32)
        whole = begin + (end - begin) // BK * BK
        if whole < end:
            y = _load(y_ptr, whole, end, m, N, BK, BM)
            x = _load(x_ptr, whole, end, n, K, BK, BN)
            sums = _add_products(y.T, x, sums, INTERPRETED)
        for row in range(begin, whole, BK):
            y = y_desc.load([row, m])
            x = x_desc.load([row, n])
            sums = _add_products(y.T, x, sums, INTERPRETED)
        _store(out_ptr + expert.to(tl.int64) * N * K, sums, m, N, n, K, INTERPRETED)


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gated_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    h_ptr,
    edges_ptr,
    F,
    beta,
    linear_beta,
    E: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The activation alone, of the rows that have an expert."""
    row = tl.program_id(0)
    if row >= tl.load(edges_ptr + E):
        return
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = row.to(tl.int64) * F + columns
    gate = tl.load(gate_ptr + places, mask=columns < F, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + places, mask=columns < F, other=0.0).to(tl.float32)
    h = _activated(gate, up, beta, linear_beta, KIND, dtype, INTERPRETED)
    tl.store(h_ptr + places, _round_to(h, dtype, INTERPRETED), mask=columns < F)


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gated_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    weights_ptr,
    order_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    h_ptr,
    parts_ptr,
    edges_ptr,
    F,
    beta,
    linear_beta,
    E: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A row of h's gradient, of a result that is not weighted: see `_finish_hidden`."""
    row = tl.program_id(0)
    end = tl.load(edges_ptr + E)
    if row >= end:
        return
    total = tl.zeros([1], tl.float32)
    for column in range(0, F, BLOCK):
        grad = _load(grad_ptr, row, end, column, F, 1, BLOCK).to(tl.float32)
        ptrs = weights_ptr, order_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, h_ptr
        total += _finish_hidden(grad, *ptrs, row, end, column, F, beta, linear_beta, KIND, INTERPRETED)
    tl.store(parts_ptr + row + tl.arange(0, 1), total)
