"""Which layers have a kernel of a whole stroke, and what holds their rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from services.common.model_config import ModelConfig
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.kernels.stroke.row_stroke import StrokeShape, choose_stage_bytes, shape_of
from services.dense_worker.model.segments import segments_of
from services.dense_worker.model.weights import empty_weights
from tests.support.model_configs import small_config

HOPPER = SimpleNamespace(is_hopper=True, num_sms=132)
LLAMA = replace(
    small_config("llama"),
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    sliding_windows=(None,) * 2,
)


def shape(
    config: ModelConfig, dtype: torch.dtype = torch.bfloat16, launcher: SimpleNamespace = HOPPER
) -> StrokeShape | str:
    weights = empty_weights(config, dtype, torch.device("cpu"))
    return shape_of(segments_of(weights).middle[0], launcher, dtype)


def test_llama_has_a_stroke_in_both_formats() -> None:
    assert shape(LLAMA) == StrokeShape(hidden=256, attn=256, inner=512, qkv=512, is_fp8=False)
    assert shape(replace(LLAMA, quantization=on_the_fly_fp8())) == StrokeShape(256, 256, 512, 512, is_fp8=True)


def test_no_stroke_leaves_out_a_part_of_a_layer() -> None:
    for config in (
        replace(LLAMA, qkv_bias=True),
        replace(LLAMA, o_bias=True),
        replace(LLAMA, qk_norm=True, family="qwen3"),
        replace(LLAMA, intermediate_size=520),
    ):
        assert isinstance(shape(config), str)
    assert isinstance(shape(LLAMA, torch.float16), str)
    assert isinstance(shape(LLAMA, launcher=SimpleNamespace(is_hopper=False, num_sms=132)), str)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    ("hidden", "attn", "inner"),
    [(256, 256, 512), (768, 1024, 2816), (4096, 4096, 11008), (5120, 5120, 13824), (8192, 8192, 28672)],
)
def test_a_stage_holds_rows_of_every_product(hidden: int, attn: int, inner: int, is_fp8: bool) -> None:
    width = 1 if is_fp8 else 2
    size = choose_stage_bytes(StrokeShape(hidden, attn, inner, 3 * attn, is_fp8))
    assert size >= max(hidden, attn, inner) * width and size % 128 == 0
