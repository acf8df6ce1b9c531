"""XOR, count and compact in one pass over memory.

A program takes one block, a thread a few of its rows. A row is PIECES runs of 16 bytes; "this element changed" becomes
one bit an element, and a prefix sum over the rows' bit counts says where each row's changes go. Then all rows write
their changes one by one, lowest bit first: as many rounds as the block's fullest row has changes, and the stores of a
round lie next to each other.

Programs end in any order, so that a block's records lie wherever one atomic add put them; a second kernel, which
moves only the changes, puts the blocks in order. So the result does not depend on the order of the programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.xor_compact.reference import BLOCKS, SIGNED, Compacted

LOAD_BYTES = 16  # of one thread


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut; the result depends on `block` alone.

    block: elements of a program, and of a run that is counted; a power of two, at most 32768. pieces: 16-byte runs of a
    row; its elements must fit 32 bits.
    """

    block: int
    pieces: int = 2
    num_warps: int = 4


TILES = {width: Tile(block) for width, block in BLOCKS.items()}
"""Bytes of an element -> how its tensor is cut."""
ORDERED_BLOCKS = 2
"""Blocks that one program puts in order."""


@dataclass(frozen=True, slots=True)
class Unordered:
    """What the first kernel leaves. records: (value << 16 | position), for 4-byte elements (value << 32 | position).

    Block b has counts_B[b] records from offsets_B[b] on; checksums_B[b] is the XOR of its XOR words, 4 bytes each.
    cursor [1] is the number of changes; when it exceeds the records' length, records are incomplete. mismatches [1]
    counts the blocks whose records do not make up their checksum, once `order_blocks` has read them.
    """

    records: Tensor
    counts_B: Tensor
    offsets_B: Tensor
    checksums_B: Tensor
    cursor: Tensor
    mismatches: Tensor


@triton.jit
def _load_words(ptr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, 4] words: 16 bytes of each row, one load."""
    offsets = tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(ptr + offsets).to(tl.uint32, bitcast=True)


@triton.jit
def _change_flags(x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The top bit of each element of the word says whether the element is not zero; all other bits are 0.

    Adding the largest value below the top bit carries into it from any bit, and never beyond.
    """
    LOW: tl.constexpr = 0x7FFFFFFF if WIDTH == 4 else (0x7FFF7FFF if WIDTH == 2 else 0x7F7F7F7F)
    TOP: tl.constexpr = 0x80000000 if WIDTH == 4 else (0x80008000 if WIDTH == 2 else 0x80808080)
    return (((x & LOW) + LOW) | x) & TOP


@triton.jit
def _change_bits(words, NUM: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bit e: element e of the row is not zero. Several words' flags are interleaved before their bits are gathered."""
    PER_WORD: tl.constexpr = 4 // WIDTH
    FOLD: tl.constexpr = 1 if WIDTH == 4 else (2 if WIDTH == 1 else min(NUM, 8))
    FOLD_MASK: tl.constexpr = (1 << (FOLD * PER_WORD)) - 1
    bits = tl.zeros_like(words[0])
    for group in tl.static_range(NUM // FOLD):
        flags = tl.zeros_like(bits)
        for i in tl.static_range(FOLD):
            flags |= _change_flags(words[group * FOLD + i], WIDTH) >> (8 * WIDTH - 1 - PER_WORD * i)
        if WIDTH == 2:
            flags = (flags | (flags >> 15)) & FOLD_MASK
        if WIDTH == 1:
            flags = ((flags * 0x00204081) >> 21) & FOLD_MASK  # byte j's bits move from 8 j to j, without a carry
        bits |= flags << (group * FOLD * PER_WORD)
    return bits


@triton.jit
def _pair_counts(bits, PER_PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of bits in each of the two lowest runs of PER_PIECE bits: one in the low half of the word, one in the high."""
    PIECE_MASK: tl.constexpr = (1 << PER_PIECE) - 1
    bits = (bits & PIECE_MASK) | ((bits << (16 - PER_PIECE)) & (PIECE_MASK << 16))
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits + (bits >> 8)) & 0x00FF00FF).to(tl.int32)


@triton.jit
def _index_of_bit(x):  # type: ignore[no-untyped-def]
    """log2 of a power of two, from its exponent as a float; any index for 0."""
    return (((x.to(tl.float32).to(tl.uint32, bitcast=True) >> 23) + 1) & 31).to(tl.int32)


@triton.jit
def _pick(choices, index, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """choices[index], an index for each row: a tree of selects, since registers have no addresses."""
    for level in tl.static_range(4):
        if (NUM >> level) > 1:
            halves: tl.tuple = ()
            for i in tl.static_range(NUM >> (level + 1)):
                halves += (tl.where((index & 1) != 0, choices[2 * i + 1], choices[2 * i]),)
            choices = halves
            index = index >> 1
    return choices[0]


@triton.jit
def _ranks(bits, PIECES: tl.constexpr, PER_PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(for each piece: where a row's n-th change goes, less n, if it lies in that piece; changes of each row; in all).

    n counts through a row's pieces, while in the block piece p of all rows precedes piece p + 1 of any. Two pieces'
    counts share the halves of one prefix sum.
    """
    ranks: tl.tuple = ()
    num_before = tl.zeros_like(bits).to(tl.int32)
    total = 0
    for pair in tl.static_range((PIECES + 1) // 2):
        counts = _pair_counts(bits >> (2 * pair * PER_PIECE), PER_PIECE)
        begins = tl.cumsum(counts, 0) - counts
        sums = tl.sum(counts, 0)
        for half in tl.static_range(min(PIECES, 2)):
            ranks += (total + ((begins >> (16 * half)) & 0xFFFF) - num_before,)
            num_before += (counts >> (16 * half)) & 0xFFFF
            total += (sums >> (16 * half)) & 0xFFFF
    return ranks, num_before, total


@triton.jit
def _record(word, position, place, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value above position; place is the element's in its word."""
    if WIDTH == 4:
        record = (word.to(tl.int64) << 32) | position.to(tl.int64)
    elif WIDTH == 2:
        record = (tl.where(place != 0, word, word << 16) & 0xFFFF0000) | position.to(tl.uint32)
    else:
        record = (((word >> (place * 8)) & 0xFF) << 16) | position.to(tl.uint32)
    return record.to(tl.int64 if WIDTH == 4 else tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=["records_ptr", "counts_ptr", "offsets_ptr", "checksums_ptr"],
)
def xor_compact_kernel(  # type: ignore[no-untyped-def]
    base_ptr,
    new_ptr,
    records_ptr,
    counts_ptr,
    offsets_ptr,
    checksums_ptr,
    cursor_ptr,
    capacity,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """base and new are whole blocks, one a program, as int32 words; the others are the fields of `Unordered`."""
    PER_WORD: tl.constexpr = 4 // WIDTH
    PER_PIECE: tl.constexpr = 4 * PER_WORD
    BLOCK_WORDS: tl.constexpr = BLOCK // PER_WORD
    ROWS: tl.constexpr = BLOCK_WORDS // (4 * PIECES)
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK_WORDS
    # All loads come before the first use, so that they are in flight together.
    base_pieces: tl.tuple = ()
    new_pieces: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        base_pieces += (_load_words(base_ptr + start + piece * ROWS * 4, ROWS),)
        new_pieces += (_load_words(new_ptr + start + piece * ROWS * 4, ROWS),)
    words: tl.tuple = ()
    checksum = tl.zeros([ROWS], tl.uint32)
    for piece in tl.static_range(PIECES):
        even, odd = tl.split(tl.reshape(base_pieces[piece] ^ new_pieces[piece], [ROWS, 2, 2]))
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        words += (word0, word1, word2, word3)
        checksum ^= word0 ^ word1 ^ word2 ^ word3
    bits = _change_bits(words, 4 * PIECES, WIDTH)
    ranks, num_changes, total = _ranks(bits, PIECES, PER_PIECE)

    offset = tl.atomic_add(cursor_ptr, total.to(tl.int64), sem="relaxed")
    tl.store(counts_ptr + block, total)
    tl.store(offsets_ptr + block, offset)
    tl.store(checksums_ptr + block, tl.xor_sum(checksum, 0).to(tl.int32, bitcast=True))

    rows = tl.arange(0, ROWS)
    fits = offset + total <= capacity
    for n in range(tl.where(fits, tl.max(num_changes, 0), 0)):
        lowest = bits & (0 - bits)
        element = _index_of_bit(lowest)
        owner = element // PER_PIECE
        place = (owner * ROWS + rows) * PER_PIECE + element % PER_PIECE
        changed = _pick(words, element // PER_WORD, 4 * PIECES)
        to_ptrs = records_ptr + offset + n + _pick(ranks, owner, PIECES)
        tl.store(to_ptrs, _record(changed, place, element % PER_WORD, WIDTH), mask=bits != 0)
        bits ^= lowest


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["mismatches_ptr"])
def order_blocks_kernel(  # type: ignore[no-untyped-def]
    records_ptr,
    counts_ptr,
    offsets_ptr,
    checksums_ptr,
    starts_ptr,
    positions_ptr,
    values_ptr,
    mismatches_ptr,
    num_blocks,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Moves ROWS blocks' records to where the blocks before them end, and holds their values against the checksums."""
    PER_WORD: tl.constexpr = 4 // WIDTH
    SHIFT: tl.constexpr = 32 if WIDTH == 4 else 16
    VALUE_MASK: tl.constexpr = (1 << (8 * WIDTH)) - 1
    blocks = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_block = blocks < num_blocks
    counts = tl.load(counts_ptr + blocks, mask=is_block, other=0)
    from_ptrs = records_ptr + tl.load(offsets_ptr + blocks, mask=is_block, other=0)
    starts = tl.load(starts_ptr + blocks, mask=is_block, other=0)
    words = tl.zeros([ROWS, COLUMNS], tl.uint32)
    for first in range(0, tl.max(counts, 0), COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        is_record = columns[None, :] < counts[:, None]
        record = tl.load(from_ptrs[:, None] + columns[None, :], mask=is_record, other=0)
        position = (record & 0xFFFF).to(tl.int32)
        value = ((record >> SHIFT) & VALUE_MASK).to(tl.uint32)
        to = starts[:, None] + columns[None, :]
        tl.store(positions_ptr + to, position.to(tl.int16), mask=is_record)
        tl.store(values_ptr + to, value.to(values_ptr.dtype.element_ty), mask=is_record)
        words ^= value << ((position % PER_WORD) * 8 * WIDTH)
    checksums = tl.load(checksums_ptr + blocks, mask=is_block, other=0).to(tl.uint32, bitcast=True)
    num_wrong = tl.sum((tl.xor_sum(words, 1) != checksums).to(tl.int32), 0)
    if num_wrong > 0:
        tl.atomic_add(mismatches_ptr, num_wrong.to(tl.int64))


def xor_compact(base: Tensor, new: Tensor, capacity: int, tile: Tile) -> Compacted:
    """`reference.xor_compact` with one pass over base and new, and one over the changes.

    Takes scratch memory of `capacity` records, 4 bytes each (8 for 4-byte elements). Waits for the device twice: the
    number of changes sizes the result, and no result leaves unchecked. Raises RuntimeError when a block's changes do not
    make up the XOR that the first pass read.
    """
    unordered = compact_blocks(base, new, capacity, tile)
    starts_B = block_starts(unordered.counts_B)  # before the wait: the device comes to it without the host
    num_changed = int(unordered.cursor.item())
    if num_changed > capacity:
        return Compacted(new.numel(), tile.block, unordered.counts_B, None, None)
    positions_N, values_N = order_blocks(unordered, starts_B, num_changed, new.dtype)
    if num_wrong := int(unordered.mismatches.item()):
        raise RuntimeError(
            f"xor_compact: the changes of {num_wrong} of {unordered.counts_B.numel()} blocks do not make up the XOR "
            "that was read: the weights were written to meanwhile, or the device's memory or compiler is at fault"
        )
    return Compacted(new.numel(), tile.block, unordered.counts_B, positions_N, values_N)


def compact_blocks(base: Tensor, new: Tensor, capacity: int, tile: Tile) -> Unordered:
    """The pass over memory. base and new are flat patterns on one device."""
    num_whole, num_blocks = new.numel() // tile.block, -(-new.numel() // tile.block)
    unordered = empty_blocks(num_blocks, capacity, new.element_size(), new.device)
    split = num_whole * tile.block
    launch(base[:split], new[:split], unordered, slice(0, num_whole), tile)
    if num_whole < num_blocks:
        # The last block, filled up with equal elements, so that no load needs a mask.
        tails = torch.zeros(2, tile.block, dtype=SIGNED[new.element_size()], device=new.device).view(new.dtype)
        for tail, whole in zip(tails, (base, new), strict=True):
            tail[: new.numel() - split] = whole[split:]
        launch(tails[0], tails[1], unordered, slice(num_whole, num_blocks), tile)
    return unordered


def empty_blocks(num_blocks: int, capacity: int, width: int, device: torch.device) -> Unordered:
    """To be filled by `launch`; width is an element's bytes."""
    cursor, mismatches = torch.zeros(2, dtype=torch.int64, device=device).split(1)
    return Unordered(
        records=torch.empty(capacity, dtype=torch.int64 if width == 4 else torch.int32, device=device),
        counts_B=torch.empty(num_blocks, dtype=torch.int32, device=device),
        offsets_B=torch.empty(num_blocks, dtype=torch.int64, device=device),
        checksums_B=torch.empty(num_blocks, dtype=torch.int32, device=device),
        cursor=cursor,
        mismatches=mismatches,
    )


def launch(base: Tensor, new: Tensor, unordered: Unordered, blocks: slice, tile: Tile) -> None:
    """Fills `blocks` of unordered from as many whole blocks of patterns."""
    num_blocks = blocks.stop - blocks.start
    if num_blocks == 0:
        return
    xor_compact_kernel[(num_blocks,)](
        _words(base),
        _words(new),
        unordered.records,
        unordered.counts_B[blocks],
        unordered.offsets_B[blocks],
        unordered.checksums_B[blocks],
        unordered.cursor,
        unordered.records.numel(),
        WIDTH=new.element_size(),
        BLOCK=tile.block,
        PIECES=tile.pieces,
        num_warps=tile.num_warps,
    )


def _words(patterns: Tensor) -> Tensor:
    """As int32; copied if it starts off a 16-byte boundary, where wide loads cannot start."""
    return (patterns if patterns.data_ptr() % LOAD_BYTES == 0 else patterns.clone()).view(torch.int32)


def block_starts(counts_B: Tensor) -> Tensor:
    """Where each block's changes start among all, int64."""
    return torch.cumsum(counts_B, 0, dtype=torch.int64) - counts_B


def order_blocks(unordered: Unordered, starts_B: Tensor, num_changed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions and values in the order of the blocks. dtype is the patterns'; adds to unordered.mismatches."""
    device, num_blocks = unordered.records.device, unordered.counts_B.numel()
    positions_N = torch.empty(num_changed, dtype=torch.int16, device=device)
    values_N = torch.empty(num_changed, dtype=SIGNED[dtype.itemsize], device=device)
    if num_blocks:
        # Wide enough that most blocks take one turn, unless that takes too many registers.
        columns = min(max(triton.next_power_of_2(num_changed * 5 // (num_blocks * 4) + 1), 32), 128)
        order_blocks_kernel[(-(-num_blocks // ORDERED_BLOCKS),)](
            unordered.records,
            unordered.counts_B,
            unordered.offsets_B,
            unordered.checksums_B,
            starts_B,
            positions_N,
            values_N,
            unordered.mismatches,
            num_blocks,
            WIDTH=dtype.itemsize,
            ROWS=ORDERED_BLOCKS,
            COLUMNS=columns,
            num_warps=1,
        )
    return positions_N.view(torch.uint16), values_N.view(dtype)
