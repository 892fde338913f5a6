"""GGUF files of Hugging Face models, in the layout of llama.cpp's converter, written with the package `gguf`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from services.common.config import EMBEDDED_MODEL

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
}


def write_gguf(
    file: Path, model: Path, kind: str, *, keys: dict[str, int | float | str] | None = None, extra: str | None = None
) -> dict[str, torch.Tensor]:
    """Writes the model of a directory with one safetensors file, its matrices in `kind`, such as "Q8_0".

    keys: further ones of the file. extra: name of a further tensor. The tokenizer is the embedded model's. Returns the
    weights that were written, by Hugging Face's names, as float32: before they are quantized.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_name(file.stem)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer)
    for key, value in (keys or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    weights = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    for name, tensor in weights.items():
        array = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = _interleaved(array, heads if "q_proj" in name else kv_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or {"lm_head.weight": "output.weight"}[name]
        _add(writer, stored, array, kind if array.ndim == 2 else "F32")
    if extra is not None:
        _add(writer, extra, np.ones(head_dim // 2, np.float32), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def dequantized(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a tensor that was stored in `kind`, in the library's own arithmetic."""
    as_type = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), as_type), as_type))


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    as_type = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), as_type), raw_dtype=as_type)


def _interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection in llama.cpp's order: it rotates neighbours, Hugging Face the halves of a head."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if each in special else gguf.TokenType.NORMAL for each in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template((EMBEDDED_MODEL / "chat_template.jinja").read_text())
