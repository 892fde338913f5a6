"""`python -m tests.chaos.vectors`: floods of inputs for vectors beside streams, through kills and clients that leave.

Vectors, scores and streams must be those of an undisturbed server, and nothing of the floods may be left.
"""

from __future__ import annotations

import argparse
import base64
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.support.clients.http_clients import client, socket_path
from tests.support.clients.streams import Collected, collect
from tests.support.cluster import Cluster, request, running_cluster

VOCAB_SIZE, TIMEOUT_S = 1024, 600.0
MAX_INPUTS = 2048  # of one request
TOLERANCE = 2e-5  # inputs are summed in other steps after a kill
KILLS = (("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker"))
PROMPTS = ("San Francisco is a", "The capital of France is", "a")
MAX_TOKENS = 200


@dataclass(frozen=True)
class Ask:
    """A request for vectors."""

    path: str
    body: dict[str, Any]

    def send(self, cluster: Cluster) -> np.ndarray:
        """All values of the answer, one after another."""
        with client(cluster.http_address) as http:
            response = http.post(self.path, json=self.body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text[:500]
        data = response.json()["data"]
        return np.concatenate([_values(each) for each in data])

    def leave(self, cluster: Cluster, after_s: float) -> None:
        """Sends it, and goes away before the answer."""
        transport = httpx2.HTTPTransport(uds=socket_path(cluster.http_address))
        with httpx2.Client(transport=transport, base_url="http://gateway") as http:
            try:
                http.post(self.path, json=self.body, timeout=after_s)
            except httpx2.TimeoutException:
                return


def draw_asks(seed: int, max_inputs: int) -> list[Ask]:
    """The largest request that is allowed, vectors of all tokens, long inputs, and pairs."""
    draw = random.Random(seed)

    def inputs(count: int, longest: int) -> list[list[int]]:
        return [[draw.randrange(10, VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(count)]

    words = [f"w{draw.randrange(9)} and w{index}" for index in range(max_inputs // 16)]
    return [
        Ask("/v1/embeddings", {"input": inputs(max_inputs, 8), "encoding_format": "base64"}),
        Ask("/v1/embeddings", {"input": inputs(max_inputs // 32, 300), "dimensions": 5}),
        Ask("/pooling", {"input": inputs(max_inputs // 64, 200), "task": "token_embed", "encoding_format": "base64"}),
        Ask("/score", {"text_1": "w1 and w2", "text_2": words}),
    ]


def undisturbed(cluster: Cluster, asks: Sequence[Ask]) -> tuple[list[np.ndarray], list[Collected]]:
    """The answers of each alone: of the requests for vectors, and of the streams."""
    return [ask.send(cluster) for ask in asks], [collect(cluster.gateway, each) for each in _messages()]


def check_round(
    cluster: Cluster,
    asks: Sequence[Ask],
    expected: tuple[list[np.ndarray], list[Collected]],
    num_each: int,
    disturb: Callable[[], None],
) -> None:
    """Sends all at once, each request several times, half of which are left; `disturb` is called meanwhile."""
    vectors, streams = expected
    with ThreadPoolExecutor(2 * num_each * len(asks) + len(streams)) as threads:
        left = [threads.submit(ask.leave, cluster, 0.1 + 0.2 * i) for i in range(num_each) for ask in asks]
        sent = [threads.submit(ask.send, cluster) for _ in range(num_each) for ask in asks]
        texts = [threads.submit(collect, cluster.gateway, each) for each in _messages()]
        disturb()
        for found, wanted in zip(texts, streams, strict=True):
            found.result().assert_equals(wanted)
        for index, each in enumerate(sent):
            np.testing.assert_allclose(each.result(), vectors[index % len(asks)], rtol=0, atol=TOLERANCE)
        for each in left:
            each.result()
    cluster.wait_idle(TIMEOUT_S)
    status = cluster.dense_status()
    assert (status.num_running, status.num_waiting) == (0, 0), status


def _messages() -> list[Any]:
    return [request(prompt, MAX_TOKENS, ignore_eos=True, seed=i) for i, prompt in enumerate(PROMPTS)]


def _values(each: dict[str, Any]) -> np.ndarray:
    found = each.get("embedding", each.get("data", each.get("score")))
    if isinstance(found, str):
        return np.frombuffer(base64.b64decode(found), "<f4")
    return np.ravel(np.asarray(found, np.float32))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.vectors", description=__doc__)
    parser.add_argument("--kills", type=int, default=6, help="rounds, %(default)s by default")
    arguments = parser.parse_args(argv)
    asks = draw_asks(1, MAX_INPUTS)
    settings = ("model.runner=pooling", "launch.max_restarts=1000", "launch.restart_delay_s=0.05")
    with (
        tempfile.TemporaryDirectory() as directory,
        running_cluster(Path(directory), *settings) as cluster,
    ):
        expected = undisturbed(cluster, asks)
        for number in range(arguments.kills):
            killed, start_s = KILLS[number % len(KILLS)], time.monotonic()

            def disturb(killed: tuple[str, ...] = killed) -> None:
                time.sleep(1.0)  # the floods have begun
                cluster.kill(*killed)

            check_round(cluster, asks, expected, 2, disturb)
            print(f"killed {' and '.join(killed)}: {time.monotonic() - start_s:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
