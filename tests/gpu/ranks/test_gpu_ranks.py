"""Two GPUs, in every arrangement: the tokens of Hugging Face in float32, also when any of the processes dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import expected_tokens, small_cluster, tokens_of
from tests.support.cluster import Cluster
from tests.support.rank_processes import PROCESSES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

LANES = "scheduler.num_lanes=2"
FAR = ("dense.device=cuda:0", "attention.device=cuda:1")
ARRANGEMENTS = {
    "tensor": ("dense.tensor_parallel_size=2",),
    "pipeline": ("dense.pipeline_parallel_size=2",),
    "pipeline-lanes": ("dense.pipeline_parallel_size=2", LANES),
    "far": FAR,
    "far-lanes": (*FAR, LANES),
    "workers": ("attention.workers=2", 'attention.devices=["cuda:0", "cuda:1"]'),
}
# All processes of an arrangement: two ranks, a dense worker with an attention worker, or with two.
ALL_PROCESSES = {"far": ("dense_worker", "attn_worker"), "workers": ("dense_worker", "attn_worker", "attn_worker-1")}


class Starts:
    """The clusters of some arrangements. Each is started while the one before is tested: most of a start is imports."""

    def __init__(self, names: list[str], path: Path, directory: Path) -> None:
        self._names, self._path, self._directory = names, path, directory
        self._thread = ThreadPoolExecutor(1)
        self._begun: dict[str, Future[tuple[Cluster, contextlib.ExitStack]]] = {}

    @contextlib.contextmanager
    def cluster(self, name: str) -> Iterator[Cluster]:
        """That of an arrangement, which ends afterwards; the next one begins to start."""
        cluster, stack = self._begin(name).result()
        with stack:
            for following in self._names[self._names.index(name) + 1 :][:1]:
                self._begin(following)
            yield cluster

    def close(self) -> None:
        """Ends those that were started and not tested."""
        self._thread.shutdown()
        for each in self._begun.values():
            if each.exception() is None:
                each.result()[1].close()

    def _begin(self, name: str) -> Future[tuple[Cluster, contextlib.ExitStack]]:
        if name not in self._begun:
            self._begun[name] = self._thread.submit(self._start, name)
        return self._begun[name]

    def _start(self, name: str) -> tuple[Cluster, contextlib.ExitStack]:
        directory, stack = self._directory / name, contextlib.ExitStack()
        directory.mkdir()
        return stack.enter_context(small_cluster(self._path, directory, *ARRANGEMENTS[name])), stack


@pytest.fixture(scope="module")
def starts(
    request: pytest.FixtureRequest, llama_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starts]:
    chosen = [each.callspec.params["cluster"] for each in request.session.items if each.path == request.path]
    starts = Starts(list(dict.fromkeys(chosen)), llama_path, tmp_path_factory.mktemp("two-gpus"))
    yield starts
    starts.close()


@pytest.fixture(scope="module", params=ARRANGEMENTS)
def cluster(request: pytest.FixtureRequest, starts: Starts) -> Iterator[Cluster]:
    with starts.cluster(request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("name", [None, *PROCESSES])
def test_streams_are_those_of_hugging_face_whoever_dies(
    request: pytest.FixtureRequest, cluster: Cluster, llama_path: Path, name: str | None
) -> None:
    arrangement = request.node.callspec.params["cluster"].removesuffix("-lanes")
    if name is not None and name not in ALL_PROCESSES.get(arrangement, PROCESSES):
        pytest.skip(f"{arrangement} has no {name}")
    assert tokens_of(cluster, name) == expected_tokens(llama_path)
