"""One cluster on the embedded model for all tests that do not need settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.observed import Observed, running_observed


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    http_address = f"gateway.http_address=127.0.0.1:{free_port()}"  # browsers know no Unix sockets
    directory = tmp_path_factory.mktemp("shared-cluster")
    settings = ("log.level=debug", "model.runner=pooling", http_address)
    with running_cluster(directory, *settings, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with running_observed(tmp_path_factory.mktemp("observed-cluster")) as observed:
        yield observed
