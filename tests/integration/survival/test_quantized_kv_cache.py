"""A KV cache of 8 bits: streams get the same tokens from the prefix cache and after each worker was killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.streams import collect_all
from tests.support.cluster import request, running_cluster
from tests.support.plain_services import PlainServices, plain_services
from tests.support.rank_processes import pid_of

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
NUM_LAYERS = 4
SCALES = {"k": 0.027, "v": 0.02}  # so that 448 times the scale is about the largest key, and value, of this model
FP8_SCHEME = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


def write_fp8_checkpoint(path: Path) -> Path:
    """The embedded model as a checkpoint that asks for an FP8 KV cache."""
    shutil.copytree(EMBEDDED_MODEL, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_SCHEME}))
    tensors = load_file(path / "model.safetensors")
    for kind, scale in SCALES.items():
        for layer in range(NUM_LAYERS):
            tensors[f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(scale)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(params=["fp8", "int8"])
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlainServices]:
    override = "attention.kv_cache_dtype=int8"
    if request.param == "fp8":
        override = f"model.path={write_fp8_checkpoint(tmp_path / 'model')}"
    with plain_services(tmp_path, override) as services:
        yield services


def test_streams_get_the_same_tokens_from_the_prefix_cache_and_after_kills(services: PlainServices) -> None:
    long = {"ignore_eos": True}
    messages = [
        request(PROMPT, 60, **long),
        request(PROMPT, 60, temperature=0.9, seed=7, **long),
        request("Who are you? " * 8, 60, temperature=0.8, seed=8, n=2, **long),
    ]
    undisturbed = collect_all(services.gateway, messages)
    num_cached = services.wait_idle().num_cached_tokens
    for collected, expected in zip(collect_all(services.gateway, messages), undisturbed, strict=True):
        collected.assert_equals(expected)
    assert services.wait_idle().num_cached_tokens - num_cached > 100, "prompts are found in the prefix cache"

    for role in ("dense_worker", "attn_worker"):
        num_starts = services.num_starts[role]
        disturbed = collect_all(services.gateway, messages, lambda role=role: services.kill(role))
        for collected, expected in zip(disturbed, undisturbed, strict=True):
            collected.assert_equals(expected)
        assert services.num_starts[role] == num_starts + 1
    services.wait_idle(timeout_s=60.0)
    has_fp8 = "dtype=float8_e4m3fn" in services.log("attn_worker")
    assert has_fp8 != ("dtype=int8" in services.log("attn_worker"))
    if has_fp8:
        assert 'source="the checkpoint"' in services.log("dense_worker")


def test_stages_keep_the_layers_that_are_skipped_as_one_worker_does(tmp_path: Path) -> None:
    """Also after the death of the second stage's attention worker, whose layers are not the first ones."""
    settings = ("attention.kv_cache_dtype=int8", "attention.kv_cache_skip_layers=[1, 2, 3]")
    messages = [request(PROMPT, 60, ignore_eos=True), request(PROMPT, 60, temperature=0.9, seed=7, ignore_eos=True)]
    found, token_bytes = [], []
    for stages in ((), ("dense.pipeline_parallel_size=2",)):
        directory = tmp_path / f"{len(stages)}"
        directory.mkdir()
        with running_cluster(directory, *settings, *stages, is_warm=True) as cluster:
            log = cluster.log_file.read_text()
            token_bytes.append([int(each) for each in re.findall(r"bytes_per_token=(\d+)", log)])
            found.append(collect_all(cluster.gateway, messages))
            if stages:
                pid = pid_of(cluster, "attn_worker-1")
                found.append(collect_all(cluster.gateway, messages, lambda pid=pid: os.kill(pid, signal.SIGKILL)))
    for each in found[1:]:
        for collected, expected in zip(each, found[0], strict=True):
            collected.assert_equals(expected)
    quantized, plain = 2 * 2 * (64 + 4), 2 * 2 * 64 * 4  # bytes in a layer: keys and values of two heads
    assert [sorted(each) for each in token_bytes] == [[quantized + 3 * plain], [quantized + plain, 2 * plain]]
