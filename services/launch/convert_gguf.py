"""`python -m services.launch.convert_gguf FILE DIRECTORY`: makes a Hugging Face directory of a GGUF file.

Tensors become safetensors: float types stay as they are, quantized ones are dequantized to float16 by the package
`gguf`, one tensor at a time. What is not known, a type, a tensor or a key, is refused by its name: nothing is left out
silently. An error is one line on standard output and status 1.
"""

from __future__ import annotations

import os
import sys

from services.common.process import die_with_parent, end_at_signals

if __name__ == "__main__":
    end_at_signals()

import json
import math
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

from services.common.errors import CapacityError, ModelError, TwostrokeError
from services.common.shorten import shorten
from services.common.terminal import progress_bar
from services.launch.gguf_header import check_header

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
KEYS = {  # of config.json, by keys of the file after the name of the architecture
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
OTHER_KEYS = {"attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "vocab_size"}
FLOAT_KEYS = {"attention.layer_norm_rms_epsilon", "rope.freq_base"}  # the other numbers are integers
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SHARD_BYTES = 4 * 10**9
DEFAULT_ROPE_THETA = 10_000.0
HEADER_BYTES = 4 * 2**30  # the most that the package may take for keys and names, a kilobyte for each element
DAMAGE = (  # what the package raises for it
    *(ValueError, LookupError, TypeError, ArithmeticError, OSError),
    *(MemoryError, RecursionError),
)


def main(file: Path, directory: Path) -> int:
    """Returns the exit status."""
    try:
        convert(file, directory)
    except TwostrokeError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"{file} cannot be converted: {error.filename or directory}: {error.strerror}")
        return 1
    return 0


def convert(file: Path, directory: Path) -> None:
    """Makes `directory`. Raises `ModelError` for what is damaged or not supported, `CapacityError` without room."""
    try:
        check_header(file)
        with _bounded_memory(file.stat().st_size + HEADER_BYTES):
            reader = gguf.GGUFReader(file)
    except DAMAGE as error:
        said = shorten(str(error) or type(error).__name__)
        raise ModelError(f"{file} is truncated, damaged or no GGUF file: {said}") from error
    config = read_config(file, reader)
    check_tensors(file, reader, config)
    dtype = _dtype_of(reader)
    needed = sum(int(tensor.n_elements) * (4 if _kind(tensor) == "F32" else 2) for tensor in reader.tensors)
    free = shutil.disk_usage(directory.parent).free
    if free < needed:
        raise CapacityError(f"{file} takes {needed} bytes as safetensors, {directory.parent} has {free} left")
    directory.mkdir()
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_weights(file, reader, config, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(file, reader, directory)


def read_config(file: Path, reader: gguf.GGUFReader) -> dict[str, Any]:
    """The config.json of the file's keys. Raises `ModelError` for an architecture or a key that is not known."""
    architecture = _value(reader, "general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file} has the architecture {shorten(repr(architecture))}, GGUF is read of {known}")
    if (num_files := _value(reader, "split.count")) not in (None, 0, 1):
        raise ModelError(f"{file} is one of {num_files} files of a model, GGUF is read of whole files")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): _value(reader, key) for key in reader.fields if key.startswith(prefix)}
    unknown = sorted(own.keys() - KEYS.keys() - OTHER_KEYS)
    if unknown or own.get("rope.scaling.type") not in (None, "none"):
        key = unknown[0] if unknown else "rope.scaling.type"
        raise ModelError(f"{file} has {prefix}{key} = {shorten(str(own[key]))}, which is not read of GGUF")
    lacking = sorted(KEYS.keys() - own.keys() - {"attention.head_count_kv", "attention.key_length"})
    if lacking:
        raise ModelError(f"{file} lacks {prefix}{lacking[0]}")
    for key, value in own.items():
        kind = float if key in FLOAT_KEYS else int
        if key != "rope.scaling.type" and not (type(value) is kind and 0 < value < math.inf):
            number = "a positive number" if kind is float else "a positive integer"
            raise ModelError(f"{file} has {prefix}{key} = {shorten(str(value))}, which is not {number}")
    config: dict[str, Any] = {name: own[key] for key, name in KEYS.items() if key in own}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("head_dim", own.get("rope.dimension_count", head_dim))
    if own.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise ModelError(f"{file} rotates {own['rope.dimension_count']} of {config['head_dim']} numbers of each head")
    if config["head_dim"] % 2:
        raise ModelError(f"{file} has heads of {config['head_dim']} numbers, rotated are pairs of them")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file} lacks the tensor token_embd.weight, a matrix")
    layers = range(config["num_hidden_layers"])
    absent = next((each for each in layers if f"blk.{each}.attn_norm.weight" not in tensors), None)
    if absent is not None:
        raise ModelError(f"{file} has {len(layers)} layers by its keys, and lacks blk.{absent}.attn_norm.weight")
    ids = {f"{name}_token_id": _value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    for name, value in ids.items():
        if value is not None and type(value) is not int:
            raise ModelError(f"{file} has tokenizer.ggml.{name} = {shorten(str(value))}, which is not an integer")
    rope = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", DEFAULT_ROPE_THETA)}
    return config | {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": int(embedding.shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope,
        **ids,
    }


def check_tensors(file: Path, reader: gguf.GGUFReader, config: dict[str, Any]) -> None:
    """Raises `ModelError` for a type or a tensor that is not known, and for a shape that is not that of `config`."""
    shapes = _shapes(config)
    for tensor in reader.tensors:
        if _kind(tensor) not in (*FLOATS, *QUANTIZED):
            known = ", ".join((*FLOATS, *QUANTIZED))
            raise ModelError(f"{file} has {tensor.name} in {_kind(tensor)}, read are {known}")
        if hf_name(tensor.name) is None:
            raise ModelError(f"{file} has the tensor {tensor.name}, which is not read of GGUF")
        if config["model_type"] == "llama" and tensor.name.endswith(".bias"):
            raise ModelError(f"{file} has the tensor {tensor.name}, Llama's layers have no biases")
        stated = tuple(reversed(tensor.shape.tolist()))
        expected = shapes[tensor.name.split(".")[-2]]
        if tensor.name.endswith(".bias"):
            expected = expected[:1]
        if stated != expected:
            raise ModelError(f"{file} has {tensor.name} in the shape {stated}, its keys ask for {expected}")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the weights of each part, as torch counts: outputs first."""
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "token_embd": (config["vocab_size"], hidden),
        "output": (config["vocab_size"], hidden),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate, hidden),
        "ffn_down": (hidden, intermediate),
        **dict.fromkeys(("output_norm", "attn_norm", "ffn_norm"), (hidden,)),
    }


def hf_name(name: str) -> str | None:
    """The name of a tensor in a Hugging Face checkpoint; None if it is not known."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    known = (TENSORS if layer is None else LAYER_TENSORS).get(part)
    prefix = "" if layer is None else f"model.layers.{layer}."
    return None if known is None else f"{prefix}{known}.{kind}"


def _write_weights(file: Path, reader: gguf.GGUFReader, config: dict[str, Any], directory: Path) -> None:
    places: dict[str, str] = {}
    shards = _shards(file, reader, config)
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, directory / name)
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(file: Path, reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors under their names in Hugging Face, as many at a time as fit into a file."""
    shard: dict[str, torch.Tensor] = {}
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    with progress_bar(f"converting {file.name}", total) as advance:
        for tensor in reader.tensors:
            made = _tensor(file, tensor, config)
            if shard and sum(each.nbytes for each in shard.values()) + made.nbytes > SHARD_BYTES:
                yield shard
                shard = {}
            shard[hf_name(tensor.name) or ""] = made
            advance(int(tensor.n_bytes))
    yield shard


def _tensor(file: Path, tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    try:
        made = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    except DAMAGE as error:
        raise ModelError(f"{file} is truncated or damaged at {tensor.name}: {shorten(str(error))}") from error
    if config["model_type"] == "llama" and re.search(r"\.attn_[qk]\.", tensor.name):
        # llama.cpp rotates neighbours, Hugging Face the halves of a head: the rows lie in another order.
        made = made.unflatten(0, (-1, config["head_dim"] // 2, 2)).transpose(1, 2).flatten(0, 2)
    made = made.to(FLOATS.get(_kind(tensor), torch.float16)).contiguous()
    if not made.isfinite().all():
        raise ModelError(f"{file} has numbers in {tensor.name} that are not finite in {made.dtype}")
    return made


def _write_tokenizer(file: Path, reader: gguf.GGUFReader, directory: Path) -> None:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelError(f"{file} lacks tokenizer.ggml.tokens, an array")
    with tempfile.TemporaryDirectory() as alone:  # files beside the model's would replace what it has itself
        (Path(alone) / "model.gguf").symlink_to(file.absolute())
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
        except Exception as error:  # of many kinds, for a tokenizer that the library cannot read
            said = shorten(str(error))
            raise ModelError(f"{file} has a tokenizer that transformers does not read: {said}") from error
    made = tokenizer.convert_ids_to_tokens(range(len(tokens)))
    number = next((number for number, token in enumerate(tokens) if made[number] != token), None)
    if number is not None:
        own, other = shorten(repr(tokens[number])), shorten(repr(made[number]))
        raise ModelError(f"{file} has {own} as its token {number}, of which transformers makes {other}")
    if _value(reader, "tokenizer.ggml.add_bos_token") and tokenizer.bos_token_id not in tokenizer.encode("a"):
        bos = tokenizer.bos_token
        if bos is None:
            raise ModelError(f"{file} asks for a token at the beginning of each text, and names none")
        pieces = [(bos, tokenizer.bos_token_id)]
        processor = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=pieces)
        tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(directory)


@contextmanager
def _bounded_memory(num_bytes: int) -> Iterator[None]:
    """What is allocated beyond `num_bytes` more than this process has now is refused with a `MemoryError`."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [each for each in (soft, hard, has + num_bytes) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _dtype_of(reader: gguf.GGUFReader) -> torch.dtype:
    """The dtype of the matrices; float16 if they are of several, or quantized."""
    kinds = {_kind(tensor) for tensor in reader.tensors if len(tensor.shape) > 1}
    return FLOATS.get(kinds.pop(), torch.float16) if len(kinds) == 1 else torch.float16


def _kind(tensor: gguf.ReaderTensor) -> str:
    return tensor.tensor_type.name


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    """None if there is no such key."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
