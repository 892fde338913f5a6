"""One cluster on the embedded model for all tests that do not need settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("shared-cluster"), "log.level=debug") as cluster:
        yield cluster
