"""Services wait for each other as they do for users, because these tests measure delays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.warm_process import SPINS


@pytest.fixture(scope="session", autouse=True)
def spinning() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SPINS, "1")
        yield
