"""What a checkpoint takes of memory, by its config.json and the headers of its files.

It reads no weights, and needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from services.common.encoders.encoder_types import is_encoder_type
from services.common.errors import ModelError
from services.common.families.names import NAMES, CheckpointNames
from services.common.json_files.read_json import read_json
from services.common.shorten import shorten
from services.common.vision.vision_config import VisionConfig

MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in its library
_ALL_WINDOWS = {"mistral", "mixtral"}  # families in which every layer has the window of config.json
# Tensors of towers for pictures, and of what is between them and the text; not of heads and norms that some leave out.
_TOWER = re.compile(
    r"(?:model\.)?(?:multi_modal_projector|qformer|query_tokens|language_projection|image_newline"
    r"|(?:visual|vision_tower|vision_model)\.(?!(?:vision_model\.)?(?:head\.|post_layernorm))"
    r"(?:(?:[a-z_]+\.)*(?:blocks|layers?)\.(?P<layer>\d+)\.)?)"
)
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # by the name in a header
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # by torch's name


def weight_bytes(path: Path, dtype: str, *, num_layers: int | None = None, to_fp8: bool = False) -> int:
    """Bytes of the weights of a Hugging Face directory in memory; 0 if it has no safetensors or an unknown family.

    dtype: torch's name of what unquantized weights become; "auto": what the file has. With `to_fp8` the matrices of
    layers are made FP8. Layers beyond `num_layers`, other parts than the model of text, and a tied head do not count.
    Raises `ModelError`.
    """
    if is_encoder_type(read_text_config(path)):
        return sum(
            math.prod(each.shape) * ITEM_BYTES.get(dtype, FLOAT_BYTES.get(each.dtype, 8)) for each in read_tensors(path)
        )
    names = names_in(path)
    return 0 if names is None else sum(_sizes(path, names, dtype, num_layers, to_fp8))


def tower_bytes(path: Path, vision: VisionConfig, dtype: str, *, to_fp8: bool) -> int:
    """Bytes of a tower's weights in memory, as `weight_bytes` of the text; with `to_fp8` Qwen's layers are FP8."""
    assert vision.tower is not None, "the model has a tower"
    num_bytes = 0
    for tensor in read_tensors(path):
        name = _TOWER.match(tensor.name)
        layer = name and name["layer"]
        if name is None or (layer is not None and int(layer) >= vision.tower.num_layers):
            continue
        is_fp8 = to_fp8 and layer is not None and len(tensor.shape) > 1 and vision.family.startswith("qwen")
        item_bytes = 1 if is_fp8 else ITEM_BYTES.get(dtype, FLOAT_BYTES.get(tensor.dtype, 0))
        num_bytes += math.prod(tensor.shape) * item_bytes
    return num_bytes


def head_bytes(path: Path, dtype: str, num_medusa_heads: int | None) -> int:
    """Bytes of Medusa's heads, of which so many are loaded; None: they are EAGLE-3's."""
    is_medusa, own_file = num_medusa_heads is not None, path / "medusa_lm_head.safetensors"
    num_bytes = 0
    for tensor in read_tensors(path, own_file if is_medusa and own_file.is_file() else path / "model.safetensors"):
        head = re.search(r"\d+", tensor.name)  # the first number of Medusa's names
        is_loaded = not (is_medusa and head) or int(head[0]) < num_medusa_heads
        if tensor.dtype in FLOAT_BYTES and is_loaded:
            num_bytes += math.prod(tensor.shape) * ITEM_BYTES.get(dtype, FLOAT_BYTES[tensor.dtype])
    return num_bytes


def embedding_bytes(path: Path, heads: Path, dtype: str) -> int:
    """Bytes of the model's whole embedding, which a rank with a part of it has, too, for heads that have none."""
    names = names_in(path)
    if names is None or any(each.name == "embed_tokens.weight" for each in read_tensors(heads)):
        return 0
    found = [each for each in read_tensors(path) if names.canonical(each.name) == f"{names.embedding}.weight"]
    return sum(math.prod(each.shape) * ITEM_BYTES.get(dtype, FLOAT_BYTES.get(each.dtype, 0)) for each in found)


def token_bytes(
    raw: dict[str, Any], item_bytes: int, num_scales: int = 0, num_layers: int | None = None, num_parts: int = 1
) -> int:
    """Bytes of a token's keys and values in the layers that keep all of them; 0 if config.json has other fields.

    num_scales: of four bytes, beside each head's keys and its values. num_parts: into which the heads are cut; fewer
    heads than parts are copied.
    """
    depth, kinds = depth_of(raw, num_layers), raw.get("layer_types")
    if isinstance(kinds, list):
        num_full = kinds[:depth].count("full_attention")
        depth = num_full or kinds[:depth].count("sliding_attention")
    elif raw.get("sliding_window") is not None and raw.get("use_sliding_window", True):
        if raw.get("model_type") not in _ALL_WINDOWS:
            return 0
    elif "full_attention_interval" in raw:
        return 0
    if "num_kv_shared_layers" in raw or "global_head_dim" in raw:
        return 0
    if "kv_lora_rank" in raw:
        return depth * (size_in(raw, "kv_lora_rank") + size_in(raw, "qk_rope_head_dim")) * item_bytes
    heads, kv_heads = size_in(raw, "num_attention_heads"), size_in(raw, "num_key_value_heads")
    if not heads or not kv_heads:
        return 0
    head_dim = size_in(raw, "head_dim") or size_in(raw, "hidden_size") // heads
    return depth * 2 * max(1, kv_heads // num_parts) * (head_dim * item_bytes + 4 * num_scales)


class Tensor(NamedTuple):
    """A tensor of a file, by its header."""

    name: str
    dtype: str
    shape: list[int]
    stored_bytes: int


def read_tensors(path: Path, single: Path | None = None) -> Iterator[Tensor]:
    """All tensors of the files that a worker opens: a single file, or those of an index."""
    single = single or path / "model.safetensors"
    index = None if single.is_file() else read_json(path / "model.safetensors.index.json")
    try:
        files = [single] if index is None else [path / name for name in sorted(set(index["weight_map"].values()))]
    except (LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}/model.safetensors.index.json is not a safetensors index: {error!r}") from error
    for file in files if index is not None or single.is_file() else ():
        try:
            with file.open("rb") as stream:
                size, num_bytes = os.fstat(stream.fileno()).st_size, int.from_bytes(stream.read(8), "little")
                if num_bytes > min(size - 8, MAX_HEADER_BYTES):
                    raise ValueError(f"its header has {num_bytes} bytes")
                header = json.loads(stream.read(num_bytes))
            for name, entry in header.items():
                if name != "__metadata__":
                    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                    if not isinstance(dtype, str):
                        raise ValueError(f"{name} has the dtype {shorten(str(dtype))}")
                    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
                        raise ValueError(f"{name} has the shape {shorten(str(shape))}")
                    if not (type(start) is type(end) is int and 0 <= start <= end):
                        raise ValueError(f"{name} is from byte {shorten(str(start))} to {shorten(str(end))}")
                    if 8 + num_bytes + end > size:
                        raise ValueError(f"{name} ends at byte {8 + num_bytes + end} of {size}")
                    yield Tensor(name, dtype, shape, end - start)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{file} is missing, truncated or damaged: {error}") from error


def _sizes(path: Path, names: CheckpointNames, dtype: str, num_layers: int | None, to_fp8: bool) -> Iterator[int]:
    """Bytes in memory of each tensor that the model of text has."""
    raw = read_text_config(path)
    most = depth_of(raw, num_layers)
    whole = {names.embedding, names.embedding_norm, names.positions, names.final_norm, names.layer_inputs}
    whole |= {names.layer_inputs_projection, names.layer_inputs_norm}
    if not raw.get("tie_word_embeddings"):
        whole.add(names.head)
    for tensor in read_tensors(path):
        name = names.canonical(tensor.name)
        layer = names.layer_of(name)
        if "zero" in name or name.endswith("g_idx"):
            continue  # smaller in memory
        if (layer is None or layer >= most) and re.sub(r"\.(weight|bias)$", "", name) not in whole:
            continue
        if tensor.dtype not in FLOAT_BYTES:
            yield tensor.stored_bytes
        elif "scale" in name:
            yield min(tensor.stored_bytes, 2 * math.prod(tensor.shape))  # formats differ
        else:
            is_fp8 = to_fp8 and layer is not None and len(tensor.shape) > 1
            item_bytes = 1 if is_fp8 else ITEM_BYTES.get(dtype, FLOAT_BYTES[tensor.dtype])
            yield math.prod(tensor.shape) * item_bytes


def read_text_config(path: Path) -> dict[str, Any]:
    """What config.json says of the model of text; empty without the file."""
    raw = read_json(path / "config.json") or {}
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def names_in(path: Path) -> CheckpointNames | None:
    """How a directory's family calls its modules; None for an unknown one."""
    family = read_text_config(path).get("model_type")
    return NAMES.get(family) if isinstance(family, str) else None


def size_in(raw: dict[str, Any], key: str) -> int:
    """A size of config.json; 0 for a family that spells it otherwise."""
    value = raw.get(key)
    return value if type(value) is int else 0


def depth_of(raw: dict[str, Any], num_layers: int | None) -> int:
    """The number of layers that run."""
    depth = next((raw[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if type(raw.get(key)) is int), 0)
    return depth if num_layers is None else min(num_layers, depth)
