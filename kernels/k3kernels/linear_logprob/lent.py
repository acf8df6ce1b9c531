"""Blocks of logits in the memory that the weight's gradient is going to fill, and the order in which they are used up.

Of K blocks of n words each, block i [M, n] belongs to words i n .. (i + 1) n - 1. When they become rows of the gradient
[V, D], one block after the other, the rows of blocks 0..i lie before block i:

    0            n D          2 n D                                                      V D
    | rows of 0  | rows of 1  | ...
                      | block 0          | block 1          | ...        | block K - 1   |

Blocks end where the memory ends. Wider than rows (M > D) the first block is the one that rows come closest to, else it is
the last; K is the most for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def lent_blocks(gradient_VD: Tensor, M: int, n: int, most: int) -> list[Tensor]:
    """Blocks [M, n] of the first words' logits in a contiguous gradient's memory: `most`, or as many as it can lend."""
    V, D = gradient_VD.shape
    size = M * n
    count = max(min((V - n) * D // size, (V * D - size) // (n * D), most), 0)
    return list(gradient_VD.view(-1)[V * D - count * size :].view(count, M, n))


def spread(V: int, blocks: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """(words, their columns of a block [M, n]) from word 0 on, until there are no more words or blocks."""
    start = 0
    for block in blocks:
        stop = min(start + block.shape[1], V)
        if start == stop:
            return
        yield slice(start, stop), block[:, : stop - start]
        start = stop
