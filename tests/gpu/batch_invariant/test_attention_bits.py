"""Attention's rows have the same bits whatever the step: alone and beside others, in chunks, behind a cached prefix."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from services.common.model_config import ModelConfig
from tests.gpu.attention_pair import Kernels, Pair, check_all_kinds_of_steps, make_config
from tests.gpu.batch_invariant.text_steps import BLOCK_SIZE, TextSteps, same_bits

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
SHAPES = [(2, 2, 128), (8, 2, 64), (7, 1, 32), (3, 3, 80), (40, 1, 32)]


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    module = pytest.importorskip("services.attn_worker.layers.batch_invariant.triton_attention", reason="needs triton")
    return Kernels(module.BatchInvariantTritonAttention, kernel_device, torch.float16)


def dtypes(kernels: Kernels) -> list[torch.dtype]:
    """Triton's interpreter multiplies bfloat16 as integers."""
    return [torch.float16] if kernels.device.type == "cpu" else [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_results_are_those_of_the_reference(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    for dtype in dtypes(kernels):
        pair = Pair(make_config(num_heads, num_kv_heads, head_dim, windows=(None, 20)), kernels, dtype)
        check_all_kinds_of_steps(pair)


def test_long_contexts_in_many_pieces_are_those_of_the_reference(kernels: Kernels) -> None:
    pair = Pair(make_config(4, 2, 32), kernels, torch.float16)
    pair.check({"a": 700, "b": 300})
    pair.check({"a": 1, "b": 1})
    pair.check({"a": 9, "b": 40})


def texts(config: ModelConfig, kernels: Kernels, dtype: torch.dtype, lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(length, config.qkv_size, generator=generator).to(dtype).to(kernels.device) for length in lengths
    ]


def alone(config: ModelConfig, kernels: Kernels, dtype: torch.dtype, qkv: torch.Tensor) -> torch.Tensor:
    """Every row in a step of its own on a GPU; in the interpreter, which is slow, some rows at a time."""
    steps = TextSteps(config, kernels, dtype, seed=9)
    steps.open("text", qkv)
    size = 1 if kernels.device.type == "cuda" else 5
    rows = []
    while (left := len(qkv) - steps.length("text")) > 0:
        rows.append(steps.step({"text": min(size, left)})["text"])
    return torch.cat(rows)


def options_of(variant: str) -> ModelConfig:
    config = make_config(8, 2, 64, windows=(None,))
    if variant == "windows":
        return make_config(8, 2, 64, windows=(40, None))
    if variant == "softcap and sinks":
        options = dataclasses.replace(config.attention, softcap=5.0, has_sinks=True)
        return dataclasses.replace(config, attention=options)
    return config


@pytest.mark.parametrize("variant", ["plain", "windows", "softcap and sinks"])
def test_rows_are_those_of_the_text_alone(kernels: Kernels, variant: str) -> None:
    config = options_of(variant)
    is_gpu = kernels.device.type == "cuda"
    lengths = [70, 300, 530, 1500] if is_gpu else [23, 290]
    for dtype in dtypes(kernels):
        all_qkv = texts(config, kernels, dtype, lengths)
        expected = [alone(config, kernels, dtype, qkv) for qkv in all_qkv]
        draw, steps = random.Random(5), TextSteps(config, kernels, dtype, seed=2)
        running: dict[str, int] = {}
        num_compared = 0
        for number in range(200 if is_gpu else 8):
            while len(running) < draw.randint(1, 12 if is_gpu else 3):
                name, index = f"{number}-{len(running)}", draw.randrange(len(lengths))
                if not steps.has_room(lengths[index]):
                    break
                steps.open(name, all_qkv[index])
                running[name] = index
            counts = {}  # not empty: there is room for a text if none runs
            for name in draw.sample(sorted(running), draw.randint(1, len(running))):
                left = lengths[running[name]] - steps.length(name)
                counts[name] = min(left, draw.choice((1, 1, 1, 2, 5, 16, 17, 40, 200, 600)))
            is_decode = max(counts.values()) == 1
            num_padding = draw.randint(0, 3) if is_decode else 0
            begins = {name: steps.length(name) for name in counts}
            for name, rows in steps.step(counts, num_padding).items():
                own = expected[running[name]][begins[name] : begins[name] + counts[name]]
                assert same_bits(rows, own), (number, counts, name, begins[name])
                num_compared += len(rows)
                if steps.length(name) == lengths[running[name]]:
                    steps.close(name)
                    del running[name]
        assert num_compared > (2000 if is_gpu else 100)


def test_a_cached_prefix_gives_the_rows_that_computing_it_gives(kernels: Kernels) -> None:
    config, dtype = options_of("plain"), torch.float16
    (qkv,) = texts(config, kernels, dtype, [300])
    steps = TextSteps(config, kernels, dtype, seed=1)
    steps.open("first", qkv)
    computed = steps.step({"first": 300})["first"]
    steps.open("second", qkv, prefix_of="first", num_cached=17 * BLOCK_SIZE)
    rows = steps.step({"second": 28})["second"]
    assert same_bits(rows, computed[17 * BLOCK_SIZE :])


def test_dropped_blocks_behind_a_window_change_no_bit(kernels: Kernels) -> None:
    config, dtype = make_config(4, 2, 64, windows=(40,)), torch.float16
    (qkv,) = texts(config, kernels, dtype, [400])
    kept, dropped = (TextSteps(config, kernels, dtype, seed=1) for _ in range(2))
    for steps in (kept, dropped):
        steps.open("text", qkv)
        steps.step({"text": 340})
    for count in (1, 30, 1):
        expected = kept.step({"text": count})["text"]
        assert same_bits(dropped.step({"text": count}, num_dropped=17)["text"], expected)
