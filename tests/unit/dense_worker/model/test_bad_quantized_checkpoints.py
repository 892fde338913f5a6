"""Quantized checkpoints that are damaged or contradict their config: each is an error that names tensor and value."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import ModelError
from services.common.model_config import load_model_config
from services.dense_worker.model.weights import load_weights
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
LAYER = "model.layers.0"
K_PROJ, UP_PROJ, DOWN_PROJ = f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    return make_model_dir(tmp_path_factory.mktemp("plain"), "llama", **sizes)


def damaged(plain_dir: Path, tmp_path: Path, name: str, edit: Callable[[Tensors], object]) -> Path:
    path = shutil.copytree(plain_dir, tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def load(path: Path) -> None:
    load_weights(path, load_model_config(path), torch.float32, CPU)


def set_value(name: str, index: Any, value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name][index] = value

    return edit


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


FP8, STATIC, BLOCKS, INT8 = "fp8 channel, token", "fp8 tensor, static", "fp8 blocks", "int8 channel, token"
PACKED, ZEROS, ORDERED = "int4 g64 with zeros", "gptq g64 with zeros", "gptq g32, act-order"
DAMAGES: list[tuple[str, Callable[[Tensors], object], str]] = [
    *(
        (FP8, set_value(f"{UP_PROJ}.weight_scale", (3, 0), value), rf"{UP_PROJ}\.weight_scale holds .* {text} at \[3")
        for value, text in [(math.nan, "nan"), (0.0, "0.0"), (-0.5, "-0.5"), (math.inf, "inf")]
    ),
    (STATIC, set_value(f"{K_PROJ}.input_scale", (), math.nan), rf"{K_PROJ}\.input_scale holds the scale nan"),
    (BLOCKS, set_value(f"{DOWN_PROJ}.weight_scale_inv", (0, 1), -1.0), r"weight_scale_inv holds the scale -1\.0 at"),
    (INT8, set_value(f"{K_PROJ}.weight_scale", 5, 0.0), rf"{K_PROJ}\.weight_scale holds the scale 0\.0"),
    (PACKED, set_value(f"{DOWN_PROJ}.weight_scale", (1, 2), math.nan), r"weight_scale holds the scale nan at \[1, 2\]"),
    ("awq g128", set_value(f"{UP_PROJ}.scales", (0, 7), 0.0), rf"{UP_PROJ}\.scales holds the scale 0\.0 at \[0, 7\]"),
    ("mxfp4", set_value(f"{UP_PROJ}.weight_scales", (2, 1), 255), r"weight_scales holds the scale NaN .* at \[2, 1\]"),
    (FP8, lambda each: each.pop(f"{K_PROJ}.weight_scale"), rf"lacks 1 tensors .* such as {K_PROJ}\.weight_scale"),
    (STATIC, lambda each: each.pop(f"{K_PROJ}.input_scale"), rf"lacks 1 tensors .* such as {K_PROJ}\.input_scale"),
    (ZEROS, lambda each: each.pop(f"{K_PROJ}.qzeros"), rf"lacks 1 tensors .* such as {K_PROJ}\.qzeros"),
    (ORDERED, lambda each: each.pop(f"{K_PROJ}.g_idx"), rf"lacks 1 tensors .* such as {K_PROJ}\.g_idx"),
    (FP8, replaced(f"{K_PROJ}.weight_scale", torch.mean), r"weight_scale in .* has shape \(\), .* calls for \(64, 1\)"),
    (STATIC, replaced(f"{K_PROJ}.weight_scale", lambda t: t.expand(64)), r"shape \(64,\), .* calls for \(\) or \(1,\)"),
    (BLOCKS, replaced(f"{DOWN_PROJ}.weight_scale_inv", torch.t), r"has shape \(2, 1\), .* calls for \(1, 2\)"),
    ("awq g128", replaced(f"{DOWN_PROJ}.scales", lambda t: t[:1]), r"scales in .* has shape \(1, 128\), .* \(2, 128\)"),
    (PACKED, replaced(f"{DOWN_PROJ}.weight_packed", torch.t), r"weight_packed in .* has shape \(32, 128\)"),
    (FP8, replaced(f"{K_PROJ}.weight", lambda t: t.float()), r"weight in .* has dtype F32, supported: F8_E4M3"),
    (FP8, replaced(f"{K_PROJ}.weight", lambda t: t.view(torch.int8)), r"has dtype I8, supported: F8_E4M3"),
    (FP8, replaced(f"{K_PROJ}.weight_scale", lambda t: t.int()), r"weight_scale in .* has dtype I32, supported: F64"),
    (INT8, replaced(f"{K_PROJ}.weight", lambda t: t.view(torch.uint8)), r"has dtype U8, supported: I8"),
    (ORDERED, set_value(f"{DOWN_PROJ}.g_idx", 11, 8), rf"{DOWN_PROJ}\.g_idx holds the group 8 at 11, expected 0 to 7"),
    (ORDERED, set_value(f"{DOWN_PROJ}.g_idx", 0, -1), r"g_idx holds the group -1 at 0, expected 0 to 7"),
    (ORDERED, replaced(f"{DOWN_PROJ}.g_idx", torch.zeros_like), r"g_idx gives group 0 256 features, group_size is 32"),
    (ZEROS, replaced(f"{DOWN_PROJ}.g_idx", lambda t: t.flip(0)), r"g_idx reorders input features, .* no act-order"),
    ("gptq g128", set_value(f"{K_PROJ}.qzeros", (0, 0), 0x77777776), r"qzeros holds the zero point 7, .* sym means 8"),
    (PACKED, set_value(f"{K_PROJ}.weight_shape", 1, 256), r"weight_shape is \[64, 256\], expected \[64, 128\]"),
    (PACKED, replaced(f"{K_PROJ}.weight_zero_point", lambda t: t.to(torch.int8)), r"weight_zero_point has shape"),
    # A tensor for which the config has no place.
    (FP8, lambda each: each.update({f"{K_PROJ}.weight_zero_point": torch.ones(64, 1)}), r"holds .*weight_zero_point"),
    (FP8, lambda each: each.update({f"{K_PROJ}.input_scale": torch.ones(1)}), r"holds .*input_scale, for which"),
    ("gptq g128", lambda each: each.update({f"{K_PROJ}.bias": torch.ones(64)}), r"holds .*k_proj\.bias, for which"),
    # lm_head is stored quantized, but the config says that it is not.
    (FP8, replaced("lm_head.weight", lambda t: t.to(torch.float8_e4m3fn)), r"lm_head\.weight in .* has dtype F8_E4M3"),
]


@pytest.mark.parametrize(("name", "edit", "message"), DAMAGES)
def test_damage_is_an_error_that_names_tensor_and_value(
    plain_dir: Path, tmp_path: Path, name: str, edit: Callable[[Tensors], object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(damaged(plain_dir, tmp_path, name, edit))


@pytest.mark.parametrize("name", [FP8, "awq g128", "gptq g128", PACKED, "mxfp4"])
def test_a_quantized_checkpoint_without_a_quantization_config_is_refused(
    plain_dir: Path, tmp_path: Path, name: str
) -> None:
    path = damaged(plain_dir, tmp_path, name, lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks \d+ tensors .*proj\.weight|holds .*weight_scale, for which|F8_E4M3"):
        load(path)


def test_an_unquantized_checkpoint_with_a_quantization_config_is_refused(plain_dir: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain_dir, tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": FORMATS["awq g128"].config}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks \d+ tensors its config\.json calls for, such as .*q_proj\.qweight"):
        load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4 g64 with zeros", "in_features 96, expected a multiple of 64, the size of a group"),
        ("awq g32", "out_features 36, expected a multiple of 8"),
        ("mxfp4", "in_features 72, expected a multiple of 32"),
    ],
)
def test_shapes_that_groups_do_not_divide_are_refused_before_any_tensor_is_read(
    tmp_path: Path, name: str, message: str
) -> None:
    sizes = {
        "int4 g64 with zeros": {"hidden_size": 96},
        "awq g32": {"hidden_size": 64, "head_dim": 18, "num_key_value_heads": 2},
        "mxfp4": {"hidden_size": 64, "head_dim": 18},
    }[name]
    path = make_model_dir(tmp_path, "llama", num_hidden_layers=1, **sizes)
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": FORMATS[name].config}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load(path)


def test_projections_of_one_layer_must_be_stored_in_the_same_way(plain_dir: Path, tmp_path: Path) -> None:
    path = damaged(plain_dir, tmp_path, FP8, lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*k_proj"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"quantizes projections in different ways .*{K_PROJ}: None"):
        load(path)


def test_scales_of_a_quantized_kv_cache_are_no_weights(plain_dir: Path, tmp_path: Path) -> None:
    names = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.output_scale")
    scales = {f"model.layers.0.{name}": torch.ones(1) for name in names}
    load(damaged(plain_dir, tmp_path, FP8, lambda tensors: tensors.update(scales)))


def test_biases_of_zeros_that_gptq_adds_are_skipped(plain_dir: Path, tmp_path: Path) -> None:
    load(damaged(plain_dir, tmp_path, "gptq g128", lambda each: each.update({f"{K_PROJ}.bias": torch.zeros(64)})))
