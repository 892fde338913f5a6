"""The dense worker's weights, read from safetensors or random, in the layout of merged projections.

The tensors here are the only copy; every backend (torch, CUDA graphs, TensorRT) reads these.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import ModelError
from services.common.model_config import ModelConfig
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.families import BUILDERS
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.parameters import tensors_by_name, with_tensors

_INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# The tensors of a layer, except a constant that old files contain.
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(?!.*rotary_emb\.inv_freq$)")
_HASH_SAMPLES = 64
_HASH_SAMPLE_BYTES = 4096


def load_weights(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Reads the safetensors of the Hugging Face directory `path`, one file or sharded.

    Each tensor is copied from the mapped file directly to its destination and converted to `dtype`, so at most one
    further tensor is in memory. Layers beyond `config.num_layers` are not read. Raises ModelError that names the file
    or tensor that is missing, damaged, or inconsistent with `config`.
    """
    files = _checkpoint_files(path)
    weights = empty_weights(config, dtype, device)
    missing = _destinations(weights)
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
    """Random weights, generated on `device`: norms are one, all else is normal with standard deviation 0.02.

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
    """A hex digest that identifies a set of weights (64 characters, BLAKE2b).

    It covers config.json, `config.num_layers` and, for each safetensors file, its name, size, header (names, dtypes,
    shapes) and 64 evenly spaced pieces of 4 KiB, including the first and last bytes. Retrained or converted weights
    differ everywhere, so samples suffice; it is not a checksum of the whole file. With `dummy_seed` (random weights) no
    weight file is read. Raises ModelError for a missing file.
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
    """The safetensors files of `path`, sorted by name. A single file takes precedence, as in transformers."""
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
    """Unties an lm_head that differs from the embedding, whatever config.json says, as transformers does."""
    embed, source = weights.embedding.table.data, "lm_head.weight"
    lm_head = torch.empty_like(embed)
    with safe_open(file, framework="pt") as tensors:
        _check_tensor(file, source, tensors.get_slice(source), lm_head)
        lm_head.copy_(tensors.get_tensor(source))
    if torch.equal(lm_head, embed):
        return weights
    return replace(weights, head=with_tensors(weights.head, tensors_by_name(weights.head) | {"lm_head": lm_head}))


def _check_tensor(file: Path, name: str, found: object, place: torch.Tensor) -> None:
    """Checks shape and dtype. `found` is a slice of safe_open, so no data is read."""
    shape, expected = tuple(found.get_shape()), tuple(place.shape)
    if shape != expected:
        raise ModelError(f"{name} in {file} has shape {shape}, config.json calls for {expected}")
    if found.get_dtype() not in _FLOAT_DTYPES:
        supported = ", ".join(_FLOAT_DTYPES)
        raise ModelError(f"{name} in {file} has dtype {found.get_dtype()}, supported: {supported}")


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """The uninitialised parts of the model's family; on the meta device they take no memory."""
    return BUILDERS[config.family](config, WeightAllocator(dtype, device))


def _destinations(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """The destinations of checkpoint tensors: the name of a tensor -> a view of our tensors."""
    destinations: dict[str, torch.Tensor] = {}
    for _, parameter in weights.named_parameters():
        views = parameter.data.split([source.num_rows for source in parameter.sources]) if parameter.sources else ()
        destinations |= zip((source.name for source in parameter.sources), views, strict=True)
    return destinations
