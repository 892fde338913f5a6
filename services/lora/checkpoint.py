"""Reads and checks PEFT checkpoints of LoRA adapters: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.errors import InvalidRequest
from services.common.families.names import WRAPPERS
from services.common.shorten import show
from services.lora.adapter_config import LayerSettings, parse_adapter_config
from services.lora.safetensors_file import SafetensorsFile, open_regular, read_exactly

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
_PREFIX = "base_model.model."
_SUFFIXES = ("lora_A.weight", "lora_B.weight")

Shapes = Mapping[str, tuple[int, int]]  # (out_features, in_features) of each linear layer, by its checkpoint's name


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """The delta of one linear layer: scale · B A. Values of BF16 are the bits, as uint16."""

    a: np.ndarray  # [rank, in_features]
    b: np.ndarray  # [out_features, rank]
    scale: float


def read_adapter(path: Path, shapes: Shapes, max_rank: int) -> dict[str, LoraTensors]:
    """The tensors of the adapter in the directory `path`, by name of the linear layer. See `check_adapter`."""
    return dict(_read(path, shapes, max_rank))


def check_adapter(path: Path, shapes: Shapes, max_rank: int) -> str:
    """The hash of the adapter in the directory `path`: of all its tensors and scales, hexadecimal.

    Reads one tensor after the other. Raises `InvalidRequest`, naming what is wrong: files that are missing or damaged,
    settings that are not supported, ranks above `max_rank`, tensors that are missing, belong to another model (`shapes`
    are those of the served one) or are not finite.
    """
    return adapter_hash(_read(path, shapes, max_rank))


def adapter_hash(tensors: Iterable[tuple[str, LoraTensors]]) -> str:
    """The hash of tensors in the order in which `read_adapter` returns them."""
    digest = hashlib.blake2b(digest_size=32)
    for name, each in tensors:
        digest.update(f"{name} {each.scale!r} {each.a.shape} {each.b.shape} {each.a.dtype} {each.b.dtype}\0".encode())
        digest.update(np.ascontiguousarray(each.a).data)
        digest.update(np.ascontiguousarray(each.b).data)
    return digest.hexdigest()


def _read(path: Path, shapes: Shapes, max_rank: int) -> Iterator[tuple[str, LoraTensors]]:
    config = parse_adapter_config(read_config(path), max_rank)
    if not (path / WEIGHTS_FILE).exists() and (path / "adapter_model.bin").exists():
        raise InvalidRequest(f"the adapter has adapter_model.bin, supported: {WEIGHTS_FILE}")
    with SafetensorsFile(path / WEIGHTS_FILE) as file:
        own_names = _own_names(file, shapes)
        modules = config.modules(own_names)
        if not modules:
            raise InvalidRequest(f"target_modules {show(config.target_modules)} are none of the model's linear layers")
        names = _find_tensors(file, modules, {theirs: shapes[own] for theirs, own in own_names.items()})
        for module, (a, b) in sorted(names.items()):
            yield own_names[module], LoraTensors(file.read(a), file.read(b), modules[module].scale)


def read_config(path: Path) -> bytes:
    """The text of adapter_config.json in the directory `path`. Raises `InvalidRequest`."""
    file, size = open_regular(path / CONFIG_FILE)
    try:
        if size > MAX_CONFIG_BYTES:
            raise InvalidRequest(f"{CONFIG_FILE} has {size} bytes, at most {MAX_CONFIG_BYTES} allowed")
        return read_exactly(file, 0, size, CONFIG_FILE)
    finally:
        os.close(file)


def _own_names(file: SafetensorsFile, shapes: Shapes) -> dict[str, str]:
    """The names of layers in `shapes`, by those in the file: PEFT's of a model that sees pictures have a wrapper."""
    for wrapper, instead in WRAPPERS.items():
        if any(name.startswith(f"{_PREFIX}{wrapper}") for name in file.entries):
            return {wrapper + own.removeprefix(instead): own for own in shapes}
    return {own: own for own in shapes}


def _find_tensors(
    file: SafetensorsFile, modules: Mapping[str, LayerSettings], shapes: Shapes
) -> dict[str, tuple[str, str]]:
    """The names of A and B in the file, by module. No tensor may be missing, too many, or of a wrong shape."""
    missing = {
        f"{_PREFIX}{module}.{suffix}": _shape(suffix, settings.rank, shapes[module])
        for module, settings in modules.items()
        for suffix in _SUFFIXES
    }
    for name, entry in file.entries.items():
        shape = missing.pop(name, None)
        if shape is None:
            raise InvalidRequest(f"{WEIGHTS_FILE} has {name[:200]!r}, which is not A or B of a targeted linear layer")
        if entry.shape != shape:
            raise InvalidRequest(
                f"{name} in {WEIGHTS_FILE} has shape {list(entry.shape)}, the served model and the adapter's rank call "
                f"for {list(shape)}"
            )
    if missing:
        raise InvalidRequest(f"{WEIGHTS_FILE} lacks {len(missing)} tensors, such as {next(iter(missing))}")
    a_suffix, b_suffix = _SUFFIXES
    return {module: (f"{_PREFIX}{module}.{a_suffix}", f"{_PREFIX}{module}.{b_suffix}") for module in modules}


def _shape(suffix: str, rank: int, linear: tuple[int, int]) -> tuple[int, int]:
    out_features, in_features = linear
    return (rank, in_features) if suffix == _SUFFIXES[0] else (out_features, rank)
