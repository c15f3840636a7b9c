from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started
