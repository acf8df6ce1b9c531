"""Tiles of logits that never leave their program: each is reduced, or written as what the next product takes.

A tile has BM rows and BN words of the vocabulary. One program walks the width from 0 up with one fp32 accumulator a
logit, so a row's sums depend on nothing but the tile's shape. Programs stay on their multiprocessor and take one tile
after the other; GROUP blocks of rows share a block of words while it is in the L2.

Logits are reduced before the temperature: `scale` = log2(e) / temperature makes a difference of them an exponent of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.triton import _add_products, _round_to

LN2 = tl.constexpr(0.6931471805599453)
NO_WORD = tl.constexpr(-1e37)  # a logit with exp 0 that, unlike infinity, is 0 times it too
STEP = tl.constexpr(128.0)  # between units; a power of 2, and within 64 of its exponent bf16 has 62 more below
LEAST = tl.constexpr(-32768.0)  # a power of 2 that is 0 in fp32, and within fp16


@triton.jit
def _place(tile, num_m, num_n, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(block of rows, block of words) of a tile."""
    group = tile // (GROUP * num_n)
    in_group = min(num_m - group * GROUP, GROUP)
    inside = tile % (GROUP * num_n)
    return group * GROUP + inside % in_group, inside // in_group


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    h_desc, w_desc, row, word, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """h w^T [BM, BN] from a row and a word on, fp32; zeros where there is no row or no word."""
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        h = h_desc.load([row, k])
        w = w_desc.load([word, k])
        sums = _add_products(h, w.T, sums, INTERPRETED)
    return sums


@triton.jit
def _column(token_ptr, rows, M, first, end):  # type: ignore[no-untyped-def]
    """Where in words first..end-1 the rows' tokens are, -1 where they are not; 32 bits, to compare with every column."""
    token = tl.load(token_ptr + rows, mask=rows < M, other=-1)
    return tl.where((token >= first) & (token < end), token - first, -1).to(tl.int32)


@triton.jit
def _unit(highest, scale):  # type: ignore[no-untyped-def]
    """The multiple of STEP next to a maximum in powers of 2: exp2(logit - unit) neither overflows nor vanishes."""
    return STEP * tl.floor(highest * scale * (1 / STEP) + 0.5)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    bits, is_token, rows, M, grad_ptr, others_ptr, entropy_ptr, grad_entropy_ptr, inverse_temperature
):
    """A tile's gradient of logits; bits = log2 p.

    (grad (1[word = token] - p) - grad_entropy p (log p + entropy)) / temperature, the second term with entropy_ptr.
    others_ptr [M] has 1 - p of the token, of which little is left near 1 where p itself is rounded.
    """
    grad = tl.load(grad_ptr + rows, mask=rows < M, other=0.0) * inverse_temperature
    others = tl.load(others_ptr + rows, mask=rows < M, other=0.0)
    p = tl.exp2(bits)
    d = tl.where(is_token, (grad * others)[:, None], -grad[:, None] * p)
    if entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + rows, mask=rows < M, other=0.0)
        of_entropy = tl.load(grad_entropy_ptr + rows, mask=rows < M, other=0.0) * inverse_temperature
        d -= of_entropy[:, None] * p * (bits * LN2 + entropy[:, None])
    return d


@triton.jit(do_not_specialize=["M", "first"])
def reduce_logits_kernel(  # type: ignore[no-untyped-def]
    h_desc,
    w_desc,
    exps_desc,
    kept_desc,
    token_ptr,
    highest_ptr,
    total_ptr,
    weighted_ptr,
    chosen_ptr,
    M,
    first,
    num_words,
    D,
    scale,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Of num_words words from `first` on, of each tile and row: the maximum m, sum exp((logit - m) / temperature) and, with
    weighted_ptr, the same sum times (logit - m), each [tiles, M]; the token's logit to chosen_ptr [M], where it is here.

    With exps_desc, a [M, num_words] of h's type, also exp2(logit scale - unit) of the tile's own unit, see
    `align_kernel`. With kept_desc, a [M, num_words], also (logit - m) scale, see `kept_gradient_kernel`.
    """
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(num_words, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        block_m, block_n = _place(tile, num_m, num_n, GROUP)
        word = first + block_n * BN
        logits = _logits(h_desc, w_desc, block_m * BM, word, D, BM, BN, BK, INTERPRETED)
        rows = block_m * BM + tl.arange(0, BM)
        words = block_n * BN + tl.arange(0, BN)
        if not EVEN:
            logits = tl.where((words < num_words)[None, :], logits, NO_WORD)
        column = _column(token_ptr, rows, M, word, tl.minimum(word + BN, first + num_words))
        chosen = tl.sum(tl.where(tl.arange(0, BN)[None, :] == column[:, None], logits, 0.0), 1)
        tl.store(chosen_ptr + rows, chosen, mask=column >= 0)
        highest = tl.max(logits, 1)
        below = logits - highest[:, None]
        exps = tl.exp2(below * scale)
        place = block_n.to(tl.int64) * M + rows
        tl.store(highest_ptr + place, highest, mask=rows < M)
        tl.store(total_ptr + place, tl.sum(exps, 1), mask=rows < M)
        if weighted_ptr is not None:
            tl.store(weighted_ptr + place, tl.sum(exps * below, 1), mask=rows < M)
        if exps_desc is not None:
            exps *= tl.exp2(highest * scale - _unit(highest, scale))[:, None]
            exps_desc.store([block_m * BM, block_n * BN], _round_to(exps, h_desc.dtype, INTERPRETED))
        if kept_desc is not None:
            bits = tl.maximum(below * scale, LEAST)
            kept_desc.store([block_m * BM, block_n * BN], bits.to(kept_desc.dtype))


@triton.jit(do_not_specialize=["M", "num_tiles"])
def merge_kernel(  # type: ignore[no-untyped-def]
    highest_ptr,
    total_ptr,
    weighted_ptr,
    chosen_ptr,
    logprob_ptr,
    entropy_ptr,
    normalizer_ptr,
    M,
    num_tiles,
    scale,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Tiles to rows, in one order and in fp64: logprob and entropy in nats, and log2 sum exp2(logit scale); fp32 [M]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < M)[None, :]
    steps = tl.arange(0, TILES)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(0, num_tiles, TILES):
        tiles = (start + steps)[:, None]
        place = tiles.to(tl.int64) * M + rows[None, :]
        of_tiles = tl.load(highest_ptr + place, mask=is_row & (tiles < num_tiles), other=float("-inf"))
        highest = tl.maximum(highest, tl.max(of_tiles, 0))
    total = (rows >= M).to(tl.float64)  # its logarithm is taken
    weighted = tl.zeros([ROWS], tl.float64)
    for start in range(0, num_tiles, TILES):
        tiles = (start + steps)[:, None]
        place = tiles.to(tl.int64) * M + rows[None, :]
        is_in = is_row & (tiles < num_tiles)
        below = tl.load(highest_ptr + place, mask=is_in, other=0.0) - highest[None, :]
        share = tl.where(is_in, tl.exp2(below * scale), 0.0).to(tl.float64)
        of_tiles = tl.load(total_ptr + place, mask=is_in, other=0.0).to(tl.float64)
        total += tl.sum(share * of_tiles, 0)
        if weighted_ptr is not None:
            of_words = tl.load(weighted_ptr + place, mask=is_in, other=0.0).to(tl.float64)
            weighted += tl.sum(share * (of_words + of_tiles * below.to(tl.float64)), 0)
    wide_scale = tl.full([1], scale, tl.float32).to(tl.float64)
    bits = tl.log2(total)
    chosen = tl.load(chosen_ptr + rows, mask=rows < M, other=0.0).to(tl.float64)
    logprob = LN2 * ((chosen - highest.to(tl.float64)) * wide_scale - bits)
    tl.store(logprob_ptr + rows, logprob.to(tl.float32), mask=rows < M)
    normalizer = highest.to(tl.float64) * wide_scale + bits
    tl.store(normalizer_ptr + rows, normalizer.to(tl.float32), mask=rows < M)
    if weighted_ptr is not None:
        entropy = LN2 * (bits - weighted / total * wide_scale)
        tl.store(entropy_ptr + rows, entropy.to(tl.float32), mask=rows < M)


@triton.jit(do_not_specialize=["M", "num_tiles"])
def align_kernel(  # type: ignore[no-untyped-def]
    exps_ptr, highest_ptr, token_ptr, unit_ptr, M, V, num_tiles, stride, scale, BN: tl.constexpr, TILES: tl.constexpr
):
    """Brings a row's tiles to the largest of their units, which it writes to unit_ptr [M], and the token's element to 0;
    a program a row.

    Units differ where logits of one row are more than 64 powers of 2 apart, so most rows are left as they are. The
    factor is a power of 2: what is not too small for its type is not rounded again. The token's part is added by
    `hidden_slope_kernel`: of a probability near 1, rounded, too little of 1 - p would be left.
    """
    row = tl.program_id(0)
    row_ptr = exps_ptr + row.to(tl.int64) * stride
    token = tl.load(token_ptr + row)
    tl.store(row_ptr + token, 0.0, mask=(token >= 0) & (token < V))
    tiles = tl.arange(0, TILES)
    highest = tl.load(highest_ptr + tiles * M + row, mask=tiles < num_tiles, other=float("-inf"))
    units = tl.where(tiles < num_tiles, _unit(highest, scale), float("-inf"))
    unit = tl.max(units, 0)
    tl.store(unit_ptr + row, unit)
    if tl.min(tl.where(tiles < num_tiles, units, unit), 0) < unit:
        columns = tl.arange(0, BN)
        for tile in range(num_tiles):
            own = _unit(tl.load(highest_ptr + tile * M + row), scale)
            if own < unit:
                words = tile * BN + columns
                is_other = (words < V) & (words != token)
                half = tl.exp2((own - unit) * 0.5)  # 2^-128 itself is none of fp32's normal numbers
                exps = tl.load(row_ptr + words, mask=is_other, other=0.0).to(tl.float32) * half * half
                tl.store(row_ptr + words, exps.to(exps_ptr.dtype.element_ty), mask=is_other)


@triton.jit
def hidden_slope_kernel(  # type: ignore[no-untyped-def]
    sums_ptr,
    w_ptr,
    token_ptr,
    unit_ptr,
    normalizer_ptr,
    logprob_ptr,
    out_ptr,
    V,
    D,
    stride_w,
    inverse_temperature,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """d logprob / d hidden = ((1 - p_token) W[token] - sum of the others' p W) / temperature.

    sums_ptr [M, D]: the others' exp2(logit scale - unit) W.
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row).to(tl.int64)
    is_word = (token >= 0) & (token < V)
    of_token = tl.load(w_ptr + token * stride_w + columns, mask=is_word & (columns < D), other=0.0).to(tl.float32)
    others = (1 - tl.exp(tl.load(logprob_ptr + row).to(tl.float64))).to(tl.float32)
    share = tl.exp2(tl.load(unit_ptr + row) - tl.load(normalizer_ptr + row))
    place = row.to(tl.int64) * D + columns
    mean = tl.load(sums_ptr + place, mask=columns < D, other=0.0) * share
    slope = (tl.where(is_word, others * of_token, 0.0) - mean) * inverse_temperature
    tl.store(out_ptr + place, _round_to(slope, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < D)


@triton.jit(do_not_specialize=["M", "first"])
def logits_gradient_kernel(  # type: ignore[no-untyped-def]
    h_desc,
    w_desc,
    d_desc,
    token_ptr,
    normalizer_ptr,
    grad_ptr,
    others_ptr,
    entropy_ptr,
    grad_entropy_ptr,
    M,
    first,
    num_words,
    D,
    scale,
    inverse_temperature,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The gradient of num_words logits a row, from word `first` on: d [M, num_words] of h's type, see `_gradient`."""
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(num_words, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        block_m, block_n = _place(tile, num_m, num_n, GROUP)
        logits = _logits(h_desc, w_desc, block_m * BM, first + block_n * BN, D, BM, BN, BK, INTERPRETED)
        rows = block_m * BM + tl.arange(0, BM)
        word = first + block_n * BN
        column = _column(token_ptr, rows, M, word, word + BN)
        is_token = tl.arange(0, BN)[None, :] == column[:, None]
        normalizer = tl.load(normalizer_ptr + rows, mask=rows < M, other=0.0)
        bits = logits * scale - normalizer[:, None]
        d = _gradient(bits, is_token, rows, M, grad_ptr, others_ptr, entropy_ptr, grad_entropy_ptr, inverse_temperature)
        d_desc.store([block_m * BM, block_n * BN], _round_to(d, h_desc.dtype, INTERPRETED))


@triton.jit(do_not_specialize=["M", "first"])
def kept_gradient_kernel(  # type: ignore[no-untyped-def]
    kept_ptr,
    d_ptr,
    highest_ptr,
    token_ptr,
    normalizer_ptr,
    grad_ptr,
    others_ptr,
    entropy_ptr,
    grad_entropy_ptr,
    M,
    first,
    num_words,
    stride,
    scale,
    inverse_temperature,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """As `logits_gradient_kernel`, from what `reduce_logits_kernel` kept of the same words; a program ROWS of a tile.

    d_ptr may be kept_ptr: the same place in another type. What is kept is 0 at a tile's maximum and exact near it, so a
    row's most probable word has its bits as in fp32.
    """
    num_n = tl.cdiv(num_words, BN)
    block_m, block_n = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    rows = block_m * ROWS + tl.arange(0, ROWS)
    words = block_n * BN + tl.arange(0, BN)
    place = rows.to(tl.int64)[:, None] * stride + words[None, :]
    is_in = (rows < M)[:, None] & (words < num_words)[None, :]
    below = tl.load(kept_ptr + place, mask=is_in, other=0.0).to(tl.float32)
    highest = tl.load(highest_ptr + block_n.to(tl.int64) * M + rows, mask=rows < M, other=0.0)
    normalizer = tl.load(normalizer_ptr + rows, mask=rows < M, other=0.0)
    bits = below + (highest * scale - normalizer)[:, None]
    column = _column(token_ptr, rows, M, first + block_n * BN, first + block_n * BN + BN)
    is_token = tl.arange(0, BN)[None, :] == column[:, None]
    d = _gradient(bits, is_token, rows, M, grad_ptr, others_ptr, entropy_ptr, grad_entropy_ptr, inverse_temperature)
    tl.store(d_ptr + place, _round_to(d, d_ptr.dtype.element_ty, INTERPRETED), mask=is_in)
