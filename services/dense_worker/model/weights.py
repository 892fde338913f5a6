"""The dense worker's weights: read from safetensors, or random, laid out once for merged projections.

The tensors here are the only copy; every backend (torch, CUDA graphs, TensorRT) reads these.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import ModelError
from services.common.model_config import ModelConfig

_INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# A layer's tensor; not the constant that old files hold besides.
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(?!.*rotary_emb\.inv_freq$)")
_HASH_SAMPLES = 64
_HASH_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are [out_features, in_features]; `None`: the model has no such tensor."""

    input_norm: torch.Tensor  # [hidden]
    qkv_weight: torch.Tensor  # [qkv_size, hidden]: q rows, then k, then v
    qkv_bias: torch.Tensor | None  # [qkv_size]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o_weight: torch.Tensor  # [hidden, attn_size]
    o_bias: torch.Tensor | None  # [hidden]
    post_norm: torch.Tensor  # [hidden]
    gate_up_weight: torch.Tensor  # [2 * intermediate, hidden]: gate rows, then up
    gate_up_bias: torch.Tensor | None  # [2 * intermediate]
    down_weight: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, contiguous, on one device and of one dtype; never written after loading."""

    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the very tensor `embed` where the two are tied

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, such as ("layers.0.qkv_weight", ...)."""
        yield "embed", self.embed
        for i, layer in enumerate(self.layers):
            for field in fields(layer):
                tensor = getattr(layer, field.name)
                if tensor is not None:
                    yield f"layers.{i}.{field.name}", tensor
        yield "final_norm", self.final_norm
        if self.lm_head is not self.embed:
            yield "lm_head", self.lm_head


def load_weights(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read the safetensors of the Hugging Face directory `path`, one file or sharded.

    Each tensor goes from the mapped file straight into its place, converted to `dtype`: besides the
    weights themselves no more than one tensor is held. Layers beyond `config.num_layers` are not read.
    Raises ModelError naming the file or tensor that is missing, damaged, or at odds with `config`.
    """
    files = _checkpoint_files(path)
    weights = empty_weights(config, dtype, device)
    missing = _places(weights, config)
    tied_head_file: Path | None = None
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    place = missing.pop(name, None)
                    if place is not None:
                        _check_tensor(file, name, tensors.get_slice(name), place)
                        place.copy_(tensors.get_tensor(name))
                    elif name == "lm_head.weight":
                        tied_head_file = file
                    elif (match := _LAYER_TENSOR.match(name)) and int(match[1]) < config.num_layers:
                        raise ModelError(f"{file} holds {name}, for which config.json has no place")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is missing, truncated or damaged: {error}") from error
    if missing:
        names = ", ".join(list(missing)[:3])
        raise ModelError(f"{path} lacks {len(missing)} tensors its config.json calls for, such as {names}")
    return weights if tied_head_file is None else _with_head_of(tied_head_file, weights)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> ModelWeights:
    """Random weights filled on `device`: norms are one, all else normal with standard deviation 0.02.

    The same seed, shapes, dtype and kind of device give the same weights.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in weights.named_tensors():
        if name.endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.02, generator=generator)
    return weights


def weights_hash(path: Path, config: ModelConfig, dummy_seed: int | None = None) -> str:
    """Hex digest that tells two sets of weights apart (64 characters, BLAKE2b).

    Covers config.json, `config.num_layers` and, of each safetensors file, its name, size, header (names,
    dtypes, shapes) and 64 evenly spaced pieces of 4 KiB, the first and the last bytes included: retrained
    or converted weights differ everywhere, so samples suffice. It is no checksum of the whole file.
    With `dummy_seed` (random weights) no weight file is read. Raises ModelError for a missing file.
    """
    digest = hashlib.blake2b(digest_size=32)
    try:
        digest.update((path / "config.json").read_bytes())
        digest.update(f"\0num_layers={config.num_layers} dummy_seed={dummy_seed}".encode())
        if dummy_seed is None:
            for file in _checkpoint_files(path):
                _hash_file(digest, file)
    except OSError as error:
        raise ModelError(f"weights of {path} cannot be read: {error}") from error
    return digest.hexdigest()


def _hash_file(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"\0{file.name} {size}\0".encode())
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header_size, size)))
        last = max(size - _HASH_SAMPLE_BYTES, 0)
        for i in range(_HASH_SAMPLES):
            stream.seek(last * i // (_HASH_SAMPLES - 1))
            digest.update(stream.read(_HASH_SAMPLE_BYTES))


def _checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of `path`, sorted by name; the single file wins, as in transformers."""
    single, index = path / "model.safetensors", path / _INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(f.name for f in path.glob("*") if f.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"found {', '.join(others[:3])}, supported: safetensors" if others else "found no weights"
        raise ModelError(f"{path} has neither model.safetensors nor {_INDEX_FILE} ({found})")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [path / name for name in sorted(names)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from error


def _with_head_of(file: Path, weights: ModelWeights) -> ModelWeights:
    """As transformers does: an lm_head unlike the embedding is not tied to it, whatever config.json says."""
    name, lm_head = "lm_head.weight", torch.empty_like(weights.embed)
    with safe_open(file, framework="pt") as tensors:
        _check_tensor(file, name, tensors.get_slice(name), lm_head)
        lm_head.copy_(tensors.get_tensor(name))
    return weights if torch.equal(lm_head, weights.embed) else replace(weights, lm_head=lm_head)


def _check_tensor(file: Path, name: str, found: object, place: torch.Tensor) -> None:
    """`found` is a slice of safe_open: shape and dtype are known without reading the data."""
    shape, expected = tuple(found.get_shape()), tuple(place.shape)
    if shape != expected:
        raise ModelError(f"{name} in {file} has shape {shape}, config.json calls for {expected}")
    if found.get_dtype() not in _FLOAT_DTYPES:
        supported = ", ".join(_FLOAT_DTYPES)
        raise ModelError(f"{name} in {file} has dtype {found.get_dtype()}, supported: {supported}")


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Uninitialised weights of the model's shapes; on the meta device they take no memory."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        hidden, gate_up = config.hidden_size, 2 * config.intermediate_size
        return LayerWeights(
            input_norm=empty(hidden),
            qkv_weight=empty(config.qkv_size, hidden),
            qkv_bias=empty(config.qkv_size) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            o_weight=empty(hidden, config.attn_size),
            o_bias=empty(hidden) if config.o_bias else None,
            post_norm=empty(hidden),
            gate_up_weight=empty(gate_up, hidden),
            gate_up_bias=empty(gate_up) if config.mlp_bias else None,
            down_weight=empty(hidden, config.intermediate_size),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )

    embed = empty(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embed=embed,
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=empty(config.hidden_size),
        lm_head=embed if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size),
    )


def _places(weights: ModelWeights, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Where each tensor of a Hugging Face checkpoint goes: its name -> a view of our tensors."""
    places = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = weights.lm_head
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_sizes = [config.attn_size, config.kv_size, config.kv_size]
    gate_up, gate_up_sizes = ("mlp.gate_proj", "mlp.up_proj"), [config.intermediate_size] * 2
    for i, layer in enumerate(weights.layers):
        merged = [
            (qkv, qkv_sizes, layer.qkv_weight, layer.qkv_bias),
            (("self_attn.o_proj",), [config.hidden_size], layer.o_weight, layer.o_bias),
            (gate_up, gate_up_sizes, layer.gate_up_weight, layer.gate_up_bias),
            (("mlp.down_proj",), [config.hidden_size], layer.down_weight, layer.down_bias),
        ]
        named = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
        }
        for projections, sizes, weight, bias in merged:
            for kind, tensor in (("weight", weight), ("bias", bias)):
                if tensor is not None:
                    names = (f"{projection}.{kind}" for projection in projections)
                    named |= zip(names, tensor.split(sizes), strict=True)
        places |= {f"model.layers.{i}.{name}": place for name, place in named.items() if place is not None}
    return places
