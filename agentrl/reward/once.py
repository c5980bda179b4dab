"""A bounded cache that computes each value once, even if several threads ask for it at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Keeps the `most` most recently used values. Failures are not kept: the next caller tries again."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[T]] = OrderedDict()

    def __reduce__(self) -> tuple[type[Once[T]], tuple[int]]:
        """A copy, here or in another process, starts empty."""
        return Once, (self._most,)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str, make: Callable[[], T]) -> T:
        """The value of `key`, from `make()` if it is not cached. Raises what `make` raises, in every thread
        that waits for it."""
        with self._lock:
            known = self._kept.get(key)
            future: Future[T] = Future()
            if known is None:
                self._kept[key] = future
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
        if known is not None:
            return known.result()
        # Outside the lock: other keys need not wait, and callers of this key wait for the future.
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                if self._kept.get(key) is future:  # it may have been evicted and made again meanwhile
                    del self._kept[key]
            future.set_exception(error)
            raise
        future.set_result(value)
        return value
