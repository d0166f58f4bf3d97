"""Running the parts of one answer together, with the first failure as the failure of the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one part fails the others are cancelled, and its exception is raised itself."""
    parts = list(parts)
    if len(parts) == 1:
        return [await parts[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


async def beside(main: Coroutine[Any, Any, T], helper: Coroutine[Any, Any, None]) -> T:
    """The result of `main`. `helper` runs until then; if it fails, `main` is cancelled and its exception is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(helper)
            result = await main
            watching.cancel()
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return result


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
