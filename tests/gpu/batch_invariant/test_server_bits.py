"""A whole server on a GPU with `dense.deterministic`: 64 streams, kills and preemptions change no bit of an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.pb import gateway_pb2
from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import Cluster, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

NUM_STREAMS, MAX_TOKENS = 64, 150
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. What is the capital of "
SETTINGS = (
    "dense.deterministic=true",
    "model.dtype=bfloat16",
    "scheduler.policy=max_utilization",
    "scheduler.max_num_seqs=48",
    "scheduler.max_num_batched_tokens=256",
    "attention.num_blocks=500",  # of 16 tokens: fewer than all requests together need
    "dense.captures_lazily=true",
    "attention.captures_lazily=true",
)


@pytest.fixture(scope="module", params=["checkpoint", "fp8"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    quantization = f"dense.quantization={request.param}"
    with gpu_cluster(tmp_path_factory.mktemp("cluster"), *SETTINGS, quantization) as cluster:
        yield cluster


def messages() -> list[gateway_pb2.GenerateRequest]:
    prompts = [PROMPT * (1 + index % 9) + str(index // 3) for index in range(NUM_STREAMS)]
    return [
        request(prompt, MAX_TOKENS, temperature=0.8 * (index % 2), seed=index, logprobs=1, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


def num_different(found: list[Collected], expected: list[Collected]) -> int:
    return sum(
        each.token_ids != alone.token_ids or each.logprobs != alone.logprobs
        for each, alone in zip(found, expected, strict=True)
    )


def test_64_streams_with_kills_have_the_bits_of_each_request_alone(cluster: Cluster) -> None:
    alone = [collect(cluster.gateway, message) for message in messages()]
    assert num_different(collect_all(cluster.gateway, messages()), alone) == 0
    for killed in ("dense_worker", "attn_worker"):
        disturbed = collect_all(cluster.gateway, messages(), lambda killed=killed: cluster.kill(killed))
        assert num_different(disturbed, alone) == 0, killed
    sampled = alone[1]
    prompt = list(cluster.gateway.Generate(request(messages()[1].prompt, 0, echo=True), timeout=60).prompt.token_ids)
    scored = collect(cluster.gateway, request([*prompt, *sampled.token_ids[0]], 0, prompt_logprobs=0))
    assert scored.prompt_logprobs[0][-MAX_TOKENS:] == sampled.logprobs[0]
