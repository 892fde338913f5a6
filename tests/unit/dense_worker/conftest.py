"""What tests of the dense worker export and build is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.dense.kept_exports import kept_exports


@pytest.fixture(scope="session", autouse=True)
def kept() -> Iterator[None]:
    with kept_exports():
        yield
