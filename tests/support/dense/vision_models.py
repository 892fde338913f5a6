"""Tiny random models that see pictures, one or more variants of each family, and what transformers computes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel

from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.operations import TorchTowerOperations, TowerOperations
from services.dense_worker.encoders.vision.picture import Picture

_TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
IMAGE_TOKEN_ID = 5


@dataclass(frozen=True)
class Variant:
    """A model, and its processor of pictures."""

    model_class: str  # of transformers
    config: Mapping[str, Any]
    processor_class: str  # in the module transformers.models.<processor_module>
    processor_module: str
    processor: Mapping[str, Any]  # fields of preprocessor_config.json


_QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
_QWEN_PROCESSOR = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 8 * 8,
    "max_pixels": 64 * 64,
}
_QWEN = "qwen2_vl.image_processing_pil_qwen2_vl"
_SPECIAL = {"image_token_id": IMAGE_TOKEN_ID, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
}
_CLIP_PROCESSOR = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_GRIDS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
del _SIGLIP["projection_dim"]
_LLAMA = {**_TEXT, "model_type": "llama"}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": 4,
}
_INTERNVL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": [32, 32],
    "patch_size": [4, 4],
    "attention_bias": True,
    "layer_scale_init_value": 0.7,
}
_INTERNVL_PROCESSOR = {"size": {"height": 32, "width": 32}, "max_patches": 6, "crop_to_patches": True}

_BLIP2 = {
    "image_token_id": IMAGE_TOKEN_ID,
    "num_query_tokens": 6,
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "qformer_config": {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    },
}
_BLIP2_PROCESSOR = (
    "BlipImageProcessorPil",
    "blip.image_processing_pil_blip",
    {"size": {"height": 32, "width": 32}},
)

VARIANTS: dict[str, Variant] = {
    "blip2": Variant(
        "Blip2ForConditionalGeneration",
        {**_BLIP2, "text_config": {**_TEXT, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}},
        *_BLIP2_PROCESSOR,
    ),
    "gemma3": Variant(  # windows in all layers but one, shorter than the text and longer than a picture
        "Gemma3ForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "boi_token_id": 6,
            "eoi_token_id": 7,
            "mm_tokens_per_image": 4,
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 3,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {**_SIGLIP},
        },
        "Gemma3ImageProcessorPil",
        "gemma3.image_processing_pil_gemma3",
        {"size": {"height": 32, "width": 32}},
    ),
    "internvl": Variant(
        "InternVLForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "image_seq_length": 16,
            "tie_word_embeddings": False,
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": _INTERNVL,
        },
        "GotOcr2ImageProcessorPil",
        "got_ocr2.image_processing_pil_got_ocr2",
        _INTERNVL_PROCESSOR,
    ),
    "internvl_6b": Variant(  # as the tower of 6B has it, with another text part
        "InternVLForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "image_seq_length": 4,
            "downsample_ratio": 0.25,
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
            "vision_config": {
                **_INTERNVL,
                "attention_bias": False,
                "use_qk_norm": True,
                "norm_type": "rms_norm",
                "use_mean_pooling": False,
            },
        },
        "GotOcr2ImageProcessorPil",
        "got_ocr2.image_processing_pil_got_ocr2",
        {**_INTERNVL_PROCESSOR, "min_patches": 2, "max_patches": 3},
    ),
    "llava": Variant(
        "LlavaForConditionalGeneration",
        {"image_token_id": IMAGE_TOKEN_ID, "text_config": _LLAMA, "vision_config": _CLIP},
        "CLIPImageProcessorPil",
        "clip.image_processing_pil_clip",
        _CLIP_PROCESSOR,
    ),
    "llava_pixtral": Variant(
        "LlavaForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
            "vision_config": _PIXTRAL,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "PixtralImageProcessorPil",
        "pixtral.image_processing_pil_pixtral",
        {"size": {"longest_edge": 50}, "patch_size": {"height": 4, "width": 4}},
    ),
    "llava_siglip": Variant(
        "LlavaForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "text_config": _LLAMA,
            "vision_config": _SIGLIP,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "SiglipImageProcessorPil",
        "siglip.image_processing_pil_siglip",
        {"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
    "llava_next": Variant(
        "LlavaNextForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "text_config": _LLAMA,
            "vision_config": _CLIP,
            "image_grid_pinpoints": _GRIDS,
        },
        "LlavaNextImageProcessorPil",
        "llava_next.image_processing_pil_llava_next",
        {**_CLIP_PROCESSOR, "image_grid_pinpoints": _GRIDS},
    ),
    "llava_onevision": Variant(  # of the pictures of the tests one has more rows than it may have
        "LlavaOnevisionForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": _SIGLIP,
            "vision_aspect_ratio": "anyres_max_1",
            "image_grid_pinpoints": _GRIDS,
        },
        "LlavaOnevisionImageProcessorPil",
        "llava_onevision.image_processing_pil_llava_onevision",
        {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": _GRIDS},
    ),
    "mistral3": Variant(
        "Mistral3ForConditionalGeneration",
        {
            "image_token_id": IMAGE_TOKEN_ID,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
            "vision_config": _PIXTRAL,
        },
        "PixtralImageProcessorPil",
        "pixtral.image_processing_pil_pixtral",
        {"size": {"longest_edge": 50}, "patch_size": {"height": 8, "width": 8}},  # of a token, as its processor passes
    ),
    "qwen2_5_vl": Variant(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_SPECIAL,
            "text_config": {
                **_TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            # As in Qwen2.5-VL-7B, the size of the MLP is no multiple of 8.
            "vision_config": {
                **_QWEN_TOWER,
                "intermediate_size": 44,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        "Qwen2VLImageProcessorPil",
        _QWEN,
        _QWEN_PROCESSOR,
    ),
    "qwen3_vl": Variant(
        "Qwen3VLForConditionalGeneration",
        {
            **_SPECIAL,
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 3,
                "head_dim": 12,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [3, 2, 1],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**_QWEN_TOWER, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
        },
        "Qwen2VLImageProcessorPil",
        _QWEN,
        {**_QWEN_PROCESSOR, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
}
VARIANTS["qwen3_vl_moe"] = replace(  # experts in all layers but one
    VARIANTS["qwen3_vl"],
    model_class="Qwen3VLMoeForConditionalGeneration",
    config={
        **VARIANTS["qwen3_vl"].config,
        "text_config": {
            **VARIANTS["qwen3_vl"].config["text_config"],
            "moe_intermediate_size": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    },
)

# Those whose encoder reads pictures among its tokens.
WITH_ENCODERS: dict[str, Variant] = {
    "blip2_t5": Variant(
        "Blip2ForConditionalGeneration",
        {
            **_BLIP2,
            "text_config": {
                "model_type": "t5",
                "vocab_size": 128,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_heads": 4,
                "relative_attention_num_buckets": 8,
                "relative_attention_max_distance": 20,
                "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False,
                "decoder_start_token_id": 0,
            },
        },
        *_BLIP2_PROCESSOR,
    ),
}


def _variant(name: str) -> Variant:
    return (VARIANTS | WITH_ENCODERS)[name]


def make_vision_model(
    path: Path, variant: str, seed: int = 0, text: Mapping[str, Any] | None = None, **token_ids: int
) -> Path:
    """Writes a model of the variant, with weights so large that pictures matter; returns `path`.

    `text`: fields of its text_config; `token_ids`: fields of its config.
    """
    each = _variant(variant)
    model_class = getattr(transformers, each.model_class)
    torch.manual_seed(seed)
    config = {**each.config, **token_ids}
    config["text_config"] = {**config["text_config"], **(text or {})}
    model = model_class(model_class.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(dict(each.processor)))
    return path


def load_true_model(path: Path, variant: str) -> PreTrainedModel:
    """The model as transformers computes it, in float32."""
    model_class = getattr(transformers, _variant(variant).model_class)
    return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def true_pixels(variant: str, pictures: Sequence[Image.Image]) -> Mapping[str, torch.Tensor]:
    """What transformers' processor makes of pictures."""
    each = _variant(variant)
    module = importlib.import_module(f"transformers.models.{each.processor_module}")
    return getattr(module, each.processor_class)(**each.processor)(images=list(pictures), return_tensors="pt")


@torch.inference_mode()
def true_logits(
    model: PreTrainedModel, variant: str, token_ids: Sequence[int], pictures: Sequence[Image.Image]
) -> torch.Tensor:
    """The logits of all tokens, [num_tokens, vocab]; the picture's tokens stand in `token_ids` as often as needed."""
    ids = torch.tensor([list(token_ids)])
    given = dict(true_pixels(variant, pictures)) if pictures else {}
    if variant.partition("_")[0] not in ("blip2", "internvl", "llava", "mistral3"):
        name = "token_type_ids" if variant == "gemma3" else "mm_token_type_ids"
        given[name] = (ids == IMAGE_TOKEN_ID).long()
    for name in ("num_crops", "num_patches"):
        given.pop(name, None)
    return model(input_ids=ids, use_cache=False, **given).logits[0]


@torch.inference_mode()
def run_tower(
    tower: Tower, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations | None = None
) -> list[torch.Tensor]:
    """The rows of all pictures, computed together."""
    parts = tower.parts(pictures, pixels, operations or TorchTowerOperations())
    try:
        while True:
            next(parts)
    except StopIteration as ended:
        return ended.value


def noise(height: int, width: int, seed: int) -> Image.Image:
    """A picture of random pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)
