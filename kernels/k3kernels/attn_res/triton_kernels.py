"""What a GPU runs for the Attention Residual read: forward, gradient, and the sum of the gradient's parts.

P programs at most are launched, and each takes every P-th token. So the weights' gradients are sums over the same tokens
in the same order on every GPU, and a token's own results depend on nothing but its rows.

A row is an address and a distance to the next token, in UNITs of elements: a tensor of its own, or a slice of a bank.
Rows are fetched into the L2 cache ahead of their use, by one instruction each, which costs no register.
"""

# Triton knows tuples that grow by +, and neither lists nor unpacking.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.triton import _round_to


@triton.jit
def _add_pairs(a, b, c, d):  # type: ignore[no-untyped-def]
    return a + c, b + d


@triton.jit
def _sum_pairs(a, b, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums by one exchange between threads."""
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0)
    return tl.reduce((a, b), 0, _add_pairs)


@triton.jit
def _sum_all(xs, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each of xs [LANES], by one exchange between warps for all; COUNT: a power of two >= their number."""
    LANES: tl.constexpr = xs[0].shape[0]
    level = ()
    for i in tl.static_range(COUNT):
        if i < len(xs):
            level = level + (tl.sum(tl.reshape(xs[i], [LANES // 32, 32]), 1),)
        else:
            level = level + (tl.zeros([LANES // 32], tl.float32),)
    for _ in tl.static_range(COUNT.bit_length() - 1):
        half = ()
        for i in tl.static_range(len(level) // 2):
            half = half + (tl.join(level[i], level[i + len(level) // 2]),)
        level = half
    level = (tl.sum(tl.reshape(level[0], [LANES // 32, COUNT]), 0),)
    for _ in tl.static_range(COUNT.bit_length() - 1):
        low, high = (), ()
        for i in tl.static_range(len(level)):
            a, b = tl.split(tl.reshape(level[i], [level[i].numel // 2, 2]))
            low, high = low + (a,), high + (b,)
        level = low + high
    sums = ()
    for i in tl.static_range(len(xs)):
        sums = sums + (tl.sum(level[i], 0),)
    return sums


@triton.jit
def _thread_sums(x, LEFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x in LEFT sums of neighbours, which one thread has: nothing is exchanged."""
    return tl.sum(tl.reshape(x, [LEFT, x.shape[0] // LEFT]), 1)


@triton.jit
def _fetch_ahead(ptr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for the BYTES from a scalar address, by the program's first thread; 0: not at all."""
    if BYTES > 0:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 is_first, thread, 0;
            @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [ptr.to(tl.int64, bitcast=True), tl.full([], BYTES, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _hidden(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 x as a number of which the compiler knows nothing: so it computes addresses where they are used, instead of
    keeping those of all rows and blocks in registers."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wide(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x in fp32, by one instruction an element. Not known to be pure: the compiler would keep the wide form of a row that
    is needed again, which takes twice the registers."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=tl.float32,
        is_pure=False,
        pack=2,
    )


@triton.jit
def _now(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 x, computed here: the compiler would put a sum off to where it is needed, and keep all its terms till then."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _row_at(ptr, at_bank, at_last, IS_LAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address in a row; the last row has a stride of its own."""
    if IS_LAST:
        return ptr + at_last
    return ptr + at_bank


@triton.jit
def _address(  # type: ignore[no-untyped-def]
    ptrs, stride, last_stride, r, t, num_tokens, P: tl.constexpr, UNIT: tl.constexpr
):
    """Of row r of token t. Rows beyond a token's last one are those of the program's next token, and behind the last
    token comes the last token again: what is loaded there is not used."""
    t = tl.minimum(t + r // len(ptrs) * P, num_tokens - 1).to(tl.int64)
    r = r % len(ptrs)
    ptr = ptrs[0]
    for s in tl.static_range(1, len(ptrs)):
        ptr = tl.where(r == s, ptrs[s], ptr)
    return ptr + t * tl.where(r == len(ptrs) - 1, last_stride, stride) * UNIT


@triton.jit
def _is_in(b: tl.constexpr, columns, BLOCK: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which columns of block b there are: known to be all wherever it is."""
    if (b + 1) * BLOCK <= D:
        return tl.full(columns.shape, True, tl.int1)
    return columns < D


@triton.jit
def _load_row(ptr, BLOCK: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """In column blocks."""
    row = ()
    for b in tl.static_range((D + BLOCK - 1) // BLOCK):
        columns = b * BLOCK + tl.arange(0, BLOCK)
        row = row + (tl.load(ptr + columns, mask=_is_in(b, columns, BLOCK, D), other=0.0),)
    return row


@triton.jit
def _load_weight(ptr, columns, is_in, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    return _wide(tl.load(ptr + columns, mask=is_in, other=0.0), INTERPRETED)


@triton.jit(do_not_specialize=["num_tokens", "eps", "next_eps"])
def attn_res_kernel(  # type: ignore[no-untyped-def]
    row_ptrs,
    stride,
    last_stride,
    norm_ptr,
    proj_ptr,
    next_norm_ptr,
    out_ptr,
    saved_ptr,
    num_tokens,
    eps,
    next_eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    FETCHED_BYTES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    P: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out = mix, or with a next_norm RMSNorm(mix) next_norm. Each row is read once; the softmax is online: with a new
    peak, what was added so far is scaled down.

    saved_ptr, None where there is no gradient: [T, 2 R + 3] fp32, see `_probability`.
    """
    R: tl.constexpr = len(row_ptrs)
    NUM_BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0)
    row = _load_row(_address(row_ptrs, stride, last_stride, 0, first, num_tokens, P, UNIT), BLOCK, D)
    ahead = ()
    for s in tl.static_range(AHEAD):
        ptr = _address(row_ptrs, stride, last_stride, s + 1, first, num_tokens, P, UNIT)
        _fetch_ahead(ptr, FETCHED_BYTES)
        ahead = ahead + (ptr,)
    query = ()
    for b in tl.static_range(NUM_BLOCKS):
        is_in = _is_in(b, b * BLOCK + lanes, BLOCK, D)
        norm = _load_weight(norm_ptr, b * BLOCK + lanes, is_in, INTERPRETED)
        query = query + (norm * _load_weight(proj_ptr, b * BLOCK + lanes, is_in, INTERPRETED),)
    for step in range(tl.cdiv(num_tokens - first, P)):
        t = first + step * P
        token_saved_ptr = saved_ptr
        if saved_ptr is not None:
            token_saved_ptr = saved_ptr + t.to(tl.int64) * (2 * R + 3)
        total = ()
        for _ in tl.static_range(NUM_BLOCKS):
            total = total + (tl.zeros([BLOCK], tl.float32),)
        weight = 0.0
        peak = float("-inf")
        for r in range(R):
            ptr = _address(row_ptrs, stride, last_stride, r + 1 + AHEAD, t, num_tokens, P, UNIT)
            _fetch_ahead(ptr, FETCHED_BYTES)
            dots, squares = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
            for b in tl.static_range(NUM_BLOCKS):
                x = _wide(row[b], INTERPRETED)
                dots += _thread_sums(x * query[b], LANES)
                squares += _thread_sums(x * x, LANES)
            behind = _load_row(ahead[0], BLOCK, D)
            ahead = ahead[1:] + (ptr,)
            dot, square = _sum_pairs(dots, squares, INTERPRETED)
            inverse = tl.rsqrt(square / D + eps)
            score = dot * inverse
            if saved_ptr is not None:
                tl.store(token_saved_ptr + 2 * r, dot)
                tl.store(token_saved_ptr + 2 * r + 1, inverse)
            if score > peak:
                shrink = tl.exp(peak - score)
                total = _times(total, shrink)
                weight *= shrink
                peak = score
            grow = tl.exp(score - peak)
            weight += grow
            new_total = ()
            for b in tl.static_range(NUM_BLOCKS):
                new_total = new_total + (total[b] + grow * _wide(row[b], INTERPRETED),)
            total = new_total
            row = behind
        mix = _times(total, 1 / weight)
        if saved_ptr is not None:
            tl.store(token_saved_ptr + 2 * R, peak)
            tl.store(token_saved_ptr + 2 * R + 1, 1 / weight)
        inverse = 1.0
        if next_norm_ptr is not None:
            squares = tl.zeros([LANES], tl.float32)
            for b in tl.static_range(NUM_BLOCKS):
                squares += _thread_sums(mix[b] * mix[b], LANES)
            inverse = tl.rsqrt(tl.sum(squares, 0) / D + next_eps)
            if saved_ptr is not None:
                tl.store(token_saved_ptr + 2 * R + 2, inverse)
        for b in tl.static_range(NUM_BLOCKS):
            columns = b * BLOCK + lanes
            is_in = _is_in(b, columns, BLOCK, D)
            out = mix[b]
            if next_norm_ptr is not None:
                out = out * inverse * _load_weight(next_norm_ptr, columns, is_in, INTERPRETED)
            rounded = _round_to(out, out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(out_ptr + (t.to(tl.int64) * D + columns), rounded, mask=is_in)


@triton.jit
def _times(blocks, scale):  # type: ignore[no-untyped-def]
    scaled = ()
    for b in tl.static_range(len(blocks)):
        scaled = scaled + (blocks[b] * scale,)
    return scaled


@triton.jit
def _probability(saved_ptr, R: tl.constexpr, r):  # type: ignore[no-untyped-def]
    """Of row r. Of a token are saved: each row's dot and 1/rms, the scores' peak, 1 / sum of exp(score - peak), and
    1/rms of the mix."""
    score = tl.load(saved_ptr + 2 * r) * tl.load(saved_ptr + 2 * r + 1)
    return tl.exp(score - tl.load(saved_ptr + 2 * R)) * tl.load(saved_ptr + 2 * R + 1)


@triton.jit
def _load_block(  # type: ignore[no-untyped-def]
    row_ptrs,
    grad_ptr,
    stride,
    last_stride,
    t,
    columns,
    is_in,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    POLICY: tl.constexpr,
):
    """The rows and the upstream gradient of token t in some columns."""
    t = t.to(tl.int64)
    at, at_last = t * UNIT * stride + columns, t * UNIT * last_stride + columns
    rows = ()
    for r in tl.static_range(len(row_ptrs)):
        rows = rows + (
            tl.load(
                _row_at(row_ptrs[r], at, at_last, r == len(row_ptrs) - 1), mask=is_in, other=0.0, eviction_policy=POLICY
            ),
        )
    return rows, tl.load(grad_ptr + (t * D + columns), mask=is_in, other=0.0)


@triton.jit
def _mix(rows, probs, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    mix = probs[0] * _wide(rows[0], INTERPRETED)
    for r in tl.static_range(1, len(rows)):
        mix += probs[r] * _wide(rows[r], INTERPRETED)
    return mix


@triton.jit(do_not_specialize=["num_tokens"])
def attn_res_gradient_kernel(  # type: ignore[no-untyped-def]
    row_ptrs,
    stride,
    last_stride,
    grad_row_ptrs,
    grad_stride,
    norm_ptr,
    proj_ptr,
    next_norm_ptr,
    grad_ptr,
    saved_ptr,
    parts_ptr,
    num_tokens,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    FETCHED_BYTES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    P: tl.constexpr,
):
    """Gradients of the rows, and in parts [2, P, D] fp32 this program's sums for norm * proj and for next_norm.

    Two passes over a token, in column blocks. The first one's sums of products say what the second one writes, which
    finds the rows in a cache, the latest first. parts_ptr is None where no weight wants a gradient, a grad_row_ptr where
    its row wants none.
    """
    R: tl.constexpr = len(row_ptrs)
    NUM_BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    query_parts, next_parts = (), ()
    if parts_ptr is not None:
        for _ in tl.static_range(NUM_BLOCKS):
            query_parts = query_parts + (tl.zeros([BLOCK], tl.float32),)
            if next_norm_ptr is not None:
                next_parts = next_parts + (tl.zeros([BLOCK], tl.float32),)
    for r in tl.static_range(R):
        _fetch_ahead(_address(row_ptrs, stride, last_stride, r, first, num_tokens, P, UNIT), FETCHED_BYTES)
    for step in range(tl.cdiv(num_tokens - first, P)):
        t = first + step * P
        hidden_t = _hidden(t, INTERPRETED)
        columns = (hidden_t - t) * BLOCK + lanes
        is_in = _is_in(0, columns, BLOCK, D)
        rows, grad = _load_block(row_ptrs, grad_ptr, stride, last_stride, hidden_t, columns, is_in, D, UNIT, "")
        token_saved_ptr = saved_ptr + t.to(tl.int64) * (2 * R + 3)
        probs, along_grad, along_mix = (), (), ()
        for r in tl.static_range(R):
            probs = probs + (_probability(token_saved_ptr, R, r),)
            along_grad = along_grad + (tl.zeros([LANES], tl.float32),)
            along_mix = along_mix + (tl.zeros([LANES], tl.float32),)
        for b in range(NUM_BLOCKS):
            hidden_t = _hidden(t, INTERPRETED)
            columns = (hidden_t - t + b) * BLOCK + lanes
            behind = columns + BLOCK
            rows_behind, grad_behind = _load_block(
                row_ptrs, grad_ptr, stride, last_stride, hidden_t, behind, behind < D, D, UNIT, ""
            )
            grad_mix = _wide(grad, INTERPRETED)
            if next_norm_ptr is not None:
                grad_mix *= _load_weight(next_norm_ptr, columns, columns < D, INTERPRETED)
                mix = _mix(rows, probs, INTERPRETED)
                new_along_mix = ()
                for r in tl.static_range(R):
                    new_along_mix = new_along_mix + (
                        along_mix[r] + _thread_sums(mix * _wide(rows[r], INTERPRETED), LANES),
                    )
                along_mix = new_along_mix
            new_along_grad = ()
            for r in tl.static_range(R):
                sums = _thread_sums(grad_mix * _wide(rows[r], INTERPRETED), LANES)
                new_along_grad = new_along_grad + (along_grad[r] + sums,)
            along_grad = new_along_grad
            rows, grad = rows_behind, grad_behind

        # The gradient of the mix is inverse * grad - back * mix.
        inverse, back = 1.0, 0.0
        grad_probs = ()
        if next_norm_ptr is not None:
            inverse = tl.load(token_saved_ptr + 2 * R + 2)
            sums = _sum_all(along_grad + along_mix, triton.next_power_of_2(2 * R))
            for r in tl.static_range(R):
                back += probs[r] * sums[r]
            back = back * inverse * inverse * inverse / D
            for r in tl.static_range(R):
                grad_probs = grad_probs + (inverse * sums[r] - back * sums[R + r],)
        else:
            grad_probs = _sum_all(along_grad, triton.next_power_of_2(R))
        mean = 0.0
        for r in tl.static_range(R):
            mean += probs[r] * grad_probs[r]
        along_query, along_row = (), ()
        for r in tl.static_range(R):
            dot, row_inverse = tl.load(token_saved_ptr + 2 * r), tl.load(token_saved_ptr + 2 * r + 1)
            scale = probs[r] * (grad_probs[r] - mean) * row_inverse
            along_query = along_query + (scale,)
            along_row = along_row + (scale * dot * row_inverse * row_inverse / D,)

        new_query_parts, new_next_parts = (), ()
        for b in tl.static_range(NUM_BLOCKS - 1, -1, -1):
            if b == NUM_BLOCKS - 1:
                for r in tl.static_range(R):
                    _fetch_ahead(_address(row_ptrs, stride, last_stride, r + R, t, num_tokens, P, UNIT), FETCHED_BYTES)
                _fetch_ahead(grad_ptr + tl.minimum(t + P, num_tokens - 1).to(tl.int64) * D, FETCHED_BYTES)
            hidden_t = _hidden(t, INTERPRETED)
            columns = (hidden_t - t + b) * BLOCK + lanes
            is_in = _is_in(b, columns, BLOCK, D)
            xs, grad_out = _load_block(
                row_ptrs, grad_ptr, stride, last_stride, hidden_t, columns, is_in, D, UNIT, "evict_first"
            )
            grad_mix = _wide(grad_out, INTERPRETED)
            if next_norm_ptr is not None:
                mix = _mix(xs, probs, INTERPRETED)
                grad_mix *= inverse
                if parts_ptr is not None:
                    new_next_parts = (_now(next_parts[b] + grad_mix * mix, INTERPRETED),) + new_next_parts
                grad_mix = grad_mix * _load_weight(next_norm_ptr, columns, is_in, INTERPRETED) - back * mix
            if parts_ptr is not None:
                part = query_parts[b]
                for r in tl.static_range(R):
                    part += along_query[r] * _wide(xs[r], INTERPRETED)
                new_query_parts = (_now(part, INTERPRETED),) + new_query_parts
            query = _load_weight(norm_ptr, columns, is_in, INTERPRETED)
            query *= _load_weight(proj_ptr, columns, is_in, INTERPRETED)
            at, at_last = hidden_t.to(tl.int64) * UNIT * grad_stride + columns, hidden_t.to(tl.int64) * D + columns
            for r in tl.static_range(R):
                if grad_row_ptrs[r] is not None:
                    grad_row = probs[r] * grad_mix + along_query[r] * query - along_row[r] * _wide(xs[r], INTERPRETED)
                    tl.store(
                        _row_at(grad_row_ptrs[r], at, at_last, r == R - 1),
                        _round_to(grad_row, grad_row_ptrs[r].dtype.element_ty, INTERPRETED),
                        mask=is_in,
                        eviction_policy="evict_first",
                    )
        if parts_ptr is not None:
            query_parts, next_parts = new_query_parts, new_next_parts
    if parts_ptr is not None:
        for b in tl.static_range(NUM_BLOCKS):
            columns = b * BLOCK + lanes
            tl.store(parts_ptr + first * D + columns, query_parts[b], mask=columns < D)
            if next_norm_ptr is not None:
                tl.store(parts_ptr + (P + first) * D + columns, next_parts[b], mask=columns < D)


@triton.jit(do_not_specialize=["num_parts"])
def attn_res_sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    norm_ptr,
    proj_ptr,
    grad_norm_ptr,
    grad_proj_ptr,
    grad_next_norm_ptr,
    num_parts,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of norm, proj and (where not None) next_norm [D], each rounded once, of the first num_parts parts."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = columns < D
    query = tl.zeros([ROWS, COLUMNS], tl.float32)
    next_norm = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_parts, ROWS):
        part = start + tl.arange(0, ROWS)
        at = part[:, None] * D + columns[None, :]
        is_part = (part < num_parts)[:, None] & is_in[None, :]
        query += tl.load(parts_ptr + at, mask=is_part, other=0.0)
        if grad_next_norm_ptr is not None:
            next_norm += tl.load(parts_ptr + P * D + at, mask=is_part, other=0.0)
    grad_query = tl.sum(query, 0)
    norm = _load_weight(norm_ptr, columns, is_in, INTERPRETED)
    proj = _load_weight(proj_ptr, columns, is_in, INTERPRETED)
    dtype: tl.constexpr = grad_norm_ptr.dtype.element_ty
    tl.store(grad_norm_ptr + columns, _round_to(grad_query * proj, dtype, INTERPRETED), mask=is_in)
    dtype_proj: tl.constexpr = grad_proj_ptr.dtype.element_ty
    tl.store(grad_proj_ptr + columns, _round_to(grad_query * norm, dtype_proj, INTERPRETED), mask=is_in)
    if grad_next_norm_ptr is not None:
        dtype_next: tl.constexpr = grad_next_norm_ptr.dtype.element_ty
        grad_next = _round_to(tl.sum(next_norm, 0), dtype_next, INTERPRETED)
        tl.store(grad_next_norm_ptr + columns, grad_next, mask=is_in)
