"""A quantized model under kills: its streams pause and get the same tokens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.streams import collect_all
from tests.support.cluster import request
from tests.support.plain_services import PlainServices, plain_services
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

PROMPT = "Count from 1 to 100, slowly, and tell of every number what you like about it. " * 4
MAX_TOKENS = 30


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    """The embedded model as GPTQ with act-order, with a prefix cache."""
    path = shutil.copytree(EMBEDDED_MODEL, tmp_path_factory.mktemp("quantized") / "model")
    quantize_model_dir(path, FORMATS["gptq g32, act-order"])
    with plain_services(tmp_path_factory.mktemp("services"), f"model.path={path}") as services:
        yield services


def test_streams_of_a_quantized_model_end_as_without_the_kill(services: PlainServices) -> None:
    messages = [
        request(PROMPT, MAX_TOKENS, ignore_eos=True),
        request(PROMPT, MAX_TOKENS, temperature=0.9, seed=7, ignore_eos=True),
        request("What is the capital of France?", MAX_TOKENS, temperature=0.8, seed=8, n=2, ignore_eos=True),
    ]
    undisturbed = collect_all(services.gateway, messages)
    for killed in ("dense_worker", "attn_worker"):
        starts = dict(services.num_starts)
        disturbed = collect_all(services.gateway, messages, lambda killed=killed: services.kill(killed))
        for collected, expected in zip(disturbed, undisturbed, strict=True):
            collected.assert_equals(expected)
        assert all(services.num_starts[role] - starts[role] == (role == killed) for role in starts), services.ends
    log = services.log("dense_worker")
    assert log.count('event="weights are quantized"') == 2 and "method=gptq" in log and "GroupedIntWeight=16" in log
    services.wait_idle(timeout_s=60.0)
