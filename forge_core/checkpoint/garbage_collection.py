"""Python's search for garbage, while the parts of all ranks' tensors are described."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1


@contextmanager
def young_objects_alone() -> Iterator[None]:
    """Search for no garbage among old objects in this context.

    Of thousands of ranks, a plan or a description is millions of objects, none of them garbage. Python searches all of
    them again and again while it unpickles them, and takes several times as long. Young objects are searched as ever.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        if thresholds[2] != _NEVER:  # else a save in another thread has set it, and takes it back
            gc.set_threshold(*thresholds)
