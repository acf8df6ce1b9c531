"""Several parts of one object at a time."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from infra.fence import pass_fence

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], parallelism: int) -> list[Result]:
    """In the order of `items`. The first failure rises once the parts under way have ended; no others are begun.

    A fence of the caller holds for its parts.
    """

    def one(item: Item) -> Result:
        pass_fence()
        return work(item)

    with ThreadPoolExecutor(parallelism) as pool:
        futures: list[Future[Result]] = [pool.submit(contextvars.copy_context().run, one, item) for item in items]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    return [future.result() for future in futures]
