"""The dense worker's weights, read from safetensors or random, in the layout of merged projections.

The tensors here are the only copy; every backend (torch, CUDA graphs, TensorRT) reads these.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch

from services.common.config import ModelSection
from services.common.errors import ModelError
from services.common.families.names import names_of
from services.common.model_config import ModelConfig
from services.common.rank import ALONE, Rank
from services.common.terminal import progress_bar
from services.common.weight_files import checkpoint_files
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.checkpoint import Checkpoint, MatrixRows, open_checkpoint
from services.dense_worker.model.families import build_decoder
from services.dense_worker.model.head import Head
from services.dense_worker.model.learned import learned_names
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.parameters import (
    Loaded,
    Parameter,
    Source,
    StoredTensor,
    parameters,
    parts_of_type,
    tensors_by_name,
    with_tensors,
)
from services.dense_worker.ranks.shard_weights import shard_weights
from services.dense_worker.ranks.stage_weights import stage_weights

RANDOM_STD = 0.02
REPORT_S = 5.0  # between two lines about the progress of loading
_HASH_SAMPLES = 64
_HASH_SAMPLE_BYTES = 4096
_HASH_PIECE_BYTES = 2**20  # of larger tensors, so that no claimed size takes memory
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in its library
# Small tensors that change what all others mean; samples could miss them.
_HASHED_WHOLE = re.compile(
    r"scale|zero|g_idx|^d2t$|\.sinks$|\.conv1d\.(weight|bias)$|\.conv\.conv\.|\.A_log$|\.dt_bias$|\.D$"
    r"|\.relative_attention_bias\.weight$"
)


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    empty: Empty | None = None,
    rank: Rank = ALONE,
    report: Callable[[str], None] = lambda line: None,
) -> ModelWeights:
    """Reads the safetensors of the Hugging Face directory `path`, one file or sharded.

    Each tensor is copied from the mapped file directly to its destination and converted to `dtype`, or to the format
    that `config.quantization` says, so at most the tensors of one projection are in memory besides. Layers beyond
    `config.num_layers` are not read; a rank reads its part alone. Raises ModelError that names the file or tensor that
    is missing, damaged, or inconsistent with `config`. A terminal shows the progress, and `report` gets a line
    for each new percent, but none within `REPORT_S` after another. `empty` as in `empty_weights`.
    """
    names = names_of(config)
    head = f"{names.head}.weight"
    with open_checkpoint(path, names.canonical) as checkpoint:
        _unstack_experts(checkpoint, config)
        weights = empty_weights(config, dtype, device, empty, rank)
        destinations = list(_destinations(weights))
        whole = empty_weights(config, dtype, torch.device("meta")) if rank.is_stage else weights
        _check_names(path, config, checkpoint, [source for source, _ in _destinations(whole)])
        num_bytes, percent, reported_at = 0, 0, time.monotonic()
        all_bytes = sum(place.nbytes for _, place in destinations)
        with progress_bar(f"loading {path.name}", all_bytes) as advance:
            for source, place in destinations:
                fill(checkpoint, source, place)
                advance(place.nbytes)
                num_bytes += place.nbytes
                now = time.monotonic()
                if 100 * num_bytes // all_bytes > percent and now - reported_at >= REPORT_S:
                    percent, reported_at = 100 * num_bytes // all_bytes, now
                    report(f"weights: {percent} %")
        has_tied_head = isinstance(weights.head, Head) and all(source.name != head for source, _ in destinations)
        return _with_own_head(checkpoint, weights, head) if has_tied_head and head in checkpoint else weights


def whole_embedding(
    section: ModelSection, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The embedding [vocab, hidden] of the model that a section of the config names, for a rank that has a part of it.

    Random weights of ranks belong to none, so theirs is another one. Raises the errors of `load_weights`.
    """
    table = empty_weights(config, dtype, torch.device("meta")).embedding.table
    whole = torch.empty(table.data.shape, dtype=dtype, device=device)
    if section.load_format == "dummy":
        return whole.normal_(std=RANDOM_STD)
    with open_checkpoint(section.path, names_of(config).canonical) as checkpoint:
        for source, place in zip(table.sources, whole.split([each.num_rows for each in table.sources]), strict=True):
            fill(checkpoint, source, place)
    return whole


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    empty: Empty | None = None,
    rank: Rank = ALONE,
) -> ModelWeights:
    """Random weights, generated on `device`: norms and layers' scalars are 1, all else has the standard deviation 0.02.

    Unquantized weights are normally distributed; for the others see `fill_random` of their format.

    The same seed, shapes, dtype and kind of device give the same weights, and another number of ranks gives others.
    What is not cut is the same on all ranks. `empty` and `rank` as in `empty_weights`.
    """
    weights = empty_weights(config, dtype, device, empty, rank)
    common = own = torch.Generator(device).manual_seed(seed)
    uncut = set[int]()
    if rank.count > 1:
        own = torch.Generator(device).manual_seed(seed + 1 + rank.index)
    if rank.count > 1 and not rank.is_stage:
        whole = dict(empty_weights(config, dtype, torch.device("meta")).named_tensors())
        uncut = {id(each) for name, each in weights.named_tensors() if each.shape == whole[name].shape}
    linears = [*parts_of_type(Linear, weights), *parts_of_type(ExpertLinear, weights)]
    quantized = [each.weight for each in linears if not isinstance(each.weight, PlainWeight)]
    for weight in quantized:
        is_uncut = all(id(each) in uncut for each in tensors_by_name(weight).values())
        weight.fill_random(RANDOM_STD, common if is_uncut else own)
    filled = {id(tensor) for weight in quantized for tensor in tensors_by_name(weight).values()}
    for name, tensor in weights.named_tensors():
        if name.endswith(("norm", "layer_scalar")):
            tensor.fill_(1.0)
        elif id(tensor) not in filled:
            tensor.normal_(std=RANDOM_STD, generator=common if id(tensor) in uncut else own)
    return weights


def hash_of_weights(section: ModelSection, config: ModelConfig) -> str:
    """The `weights_hash` of the model that a section of the config names."""
    return weights_hash(section.path, config, section.dummy_seed if section.load_format == "dummy" else None)


def weights_hash(path: Path, config: ModelConfig, dummy_seed: int | None = None) -> str:
    """A hex digest that identifies a set of weights (64 characters, BLAKE2b).

    It covers config.json, `config.num_layers` and, for each safetensors file, its name, size, header (names, dtypes,
    shapes) and 64 evenly spaced pieces of 4 KiB, including the first and last bytes. Retrained or converted weights
    differ everywhere, so samples suffice; it is not a checksum of the whole file. For quantized weights it also covers
    the schemes of `config.quantization`, and all scales, zero points and orders of features whole, and for a model with
    learned sinks, a relative bias or gated delta layers what the attention worker computes with. With `dummy_seed`
    (random weights) no weight file is read. Raises ModelError for a missing or damaged file.
    """
    digest = hashlib.blake2b(digest_size=32)
    options = config.attention
    hashes_small = config.quantization is not None or options.has_sinks or options.relative_bias is not None
    hashes_small = hashes_small or bool(config.recurrent_layers)
    with _naming_weights_of(path):
        digest.update((path / "config.json").read_bytes())
        digest.update(f"\0num_layers={config.num_layers} dummy_seed={dummy_seed}".encode())
        if config.quantization is not None:
            digest.update(repr(config.quantization).encode())
        if dummy_seed is None:
            for file in checkpoint_files(path):
                _hash_file(digest, file, hashes_small)
    return digest.hexdigest()


def heads_hash(path: Path, files: Iterable[Path]) -> str:
    """The same of heads that draft, in safetensors of the directory `path`."""
    digest = hashlib.blake2b(digest_size=32)
    with _naming_weights_of(path):
        digest.update((path / "config.json").read_bytes())
        for file in files:
            _hash_file(digest, file, hashes_small=True)
    return digest.hexdigest()


@contextmanager
def _naming_weights_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"weights of {path} cannot be read: {error}") from error


def _hash_file(digest: hashlib.blake2b, file: Path, hashes_small: bool) -> None:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(f"\0{file.name} {size}\0".encode())
        header = _read_header(stream, size, file)
        digest.update(header)
        last = max(size - _HASH_SAMPLE_BYTES, 0)
        for i in range(_HASH_SAMPLES):
            stream.seek(last * i // (_HASH_SAMPLES - 1))
            digest.update(stream.read(_HASH_SAMPLE_BYTES))
        if hashes_small:
            for start, end in _places_of_small(header, size, file):
                stream.seek(start)
                for left in range(end - start, 0, -_HASH_PIECE_BYTES):
                    digest.update(stream.read(min(left, _HASH_PIECE_BYTES)))


def _read_header(stream: BinaryIO, size: int, file: Path) -> bytes:
    num_bytes, most = int.from_bytes(stream.read(8), "little"), min(size - 8, MAX_HEADER_BYTES)
    if num_bytes > most:
        raise ModelError(f"{file} is truncated or damaged: its header has {num_bytes} bytes, at most {most} expected")
    return stream.read(num_bytes)


def _places_of_small(header: bytes, size: int, file: Path) -> list[tuple[int, int]]:
    """Where the tensors begin and end in a file of `size` bytes, in the order of the file."""
    first = 8 + len(header)
    try:
        entries = json.loads(header)
        offsets = [each["data_offsets"] for name, each in entries.items() if _HASHED_WHOLE.search(name)]
        places = sorted((first + start, first + end) for start, end in offsets)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is truncated or damaged: {type(error).__name__}: {error}") from error
    for start, end in places:
        if not first <= start <= end <= size:
            raise ModelError(f"{file} is truncated or damaged: a tensor lies at {start} to {end} of {size} bytes")
    return places


def _check_names(path: Path, config: ModelConfig, checkpoint: Checkpoint, sources: list[Source]) -> None:
    """Raises ModelError for the first tensors that are missing, and for one that nothing reads."""
    inputs = [each for source in sources if source.conversion is not None for each in source.conversion.inputs]
    required = [each.names for each in inputs if not each.is_optional]
    required += [(source.name,) for source in sources if source.conversion is None]
    missing = [names[0] for names in dict.fromkeys(required) if not any(name in checkpoint for name in names)]
    if missing:
        names = ", ".join(missing[:3])
        raise ModelError(f"{path} lacks {len(missing)} tensors its config.json calls for, such as {names}")
    known = {name for names in required for name in names} | {name for each in inputs for name in each.names}
    # The attention worker gets these.
    known.update(learned_names(config))
    page, heads = names_of(config), config.layer_heads
    of_keys = tuple(f"{name}." for name in (*page.qkv[1:], page.k_norm))
    for name in checkpoint.names:
        layer = page.layer_of(name)
        if name in known or layer is None:
            continue
        if layer >= config.num_layers:
            if config.num_stored_layers is None or layer < config.num_stored_layers:
                continue
        elif heads[layer].kv_layer is not None and name.removeprefix(f"{page.layers}.{layer}.").startswith(of_keys):
            continue  # published files have them, though the layer reads the keys of another one
        if not _is_empty_bias(config, checkpoint, name):
            raise ModelError(f"{checkpoint.file_of(name)} holds {name}, for which config.json has no place")


def _is_empty_bias(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    """Whether it is a bias of zeros, which programs for GPTQ add to layers that have none."""
    if config.quantization is None or config.quantization.method != "gptq" or not name.endswith(".bias"):
        return False
    return not checkpoint.tensor(name).any()


def fill(checkpoint: Checkpoint, source: Source, place: torch.Tensor) -> None:
    """Reads what a source names, converts it on the device of `place`, and writes it there."""
    if source.conversion is None:
        place.copy_(checkpoint.read(source.name, FLOATS, (tuple(place.shape),)))
        return
    tensors = [_load(checkpoint, stored, place.device) for stored in source.conversion.inputs]
    rows = source.conversion.convert(*tensors)
    assert rows.shape == place.shape, f"{source.name}: {rows.shape} for {place.shape}"
    place.copy_(rows)


def _load(checkpoint: Checkpoint, stored: StoredTensor, device: torch.device) -> Loaded | None:
    """The first of the alternatives that the checkpoint has; None if it has none, which only an optional one may."""
    name = next((name for name in stored.names if name in checkpoint), None)
    if name is None:
        return None
    tensor = checkpoint.read(name, stored.dtypes, stored.shapes, stored.part)
    return Loaded(f"{name}{stored.part or ''}", tensor.to(device))


def _with_own_head(checkpoint: Checkpoint, weights: ModelWeights, head: str) -> ModelWeights:
    """Unties an lm_head that differs from the embedding, whatever config.json says, as transformers does."""
    table = next(each for each in (weights.embedding.table, *parameters(weights.head.lm_head)) if each.sources)
    embed, lm_head = table.data, torch.empty_like(table.data)
    own = Parameter(table.name, lm_head, tuple(_renamed(each, head) for each in table.sources))
    for source, place in places(own):
        fill(checkpoint, source, place)
    if torch.equal(lm_head, embed):
        return weights
    return replace(weights, head=with_tensors(weights.head, tensors_by_name(weights.head) | {"lm_head": lm_head}))


def _renamed(source: Source, name: str) -> Source:
    """The source of an equal tensor under another name."""
    conversion = source.conversion
    if conversion is not None:
        conversion = replace(conversion, inputs=tuple(replace(each, names=(name,)) for each in conversion.inputs))
    return replace(source, name=name, conversion=conversion)


def empty_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    empty: Empty | None = None,
    rank: Rank = ALONE,
) -> ModelWeights:
    """The uninitialised parts of the model's family; on the meta device they take no memory.

    `empty` makes their tensors, on `device` and always in the same order; None: each one has memory of its own. Raises
    ModelError for shapes that the format of quantized weights does not allow.
    """
    allocator = WeightAllocator(dtype, device, config.quantization, empty)
    if rank.count == 1:
        return build_decoder(config, allocator)
    whole = build_decoder(config, WeightAllocator(dtype, torch.device("meta"), config.quantization))
    if rank.is_stage:
        return stage_weights(config, whole, rank, allocator)
    return shard_weights(config, whole, rank, allocator)


def _destinations(weights: ModelWeights) -> Iterator[tuple[Source, torch.Tensor]]:
    """What a checkpoint fills: the source, and a view of one of our tensors."""
    for _, parameter in weights.named_parameters():
        yield from places(parameter)


def places(parameter: Parameter) -> Iterator[tuple[Source, torch.Tensor]]:
    """What a checkpoint fills of a parameter: each source, and a view of its rows."""
    views = parameter.data.split([source.num_rows for source in parameter.sources]) if parameter.sources else ()
    yield from zip(parameter.sources, views, strict=True)


def _unstack_experts(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Gives the parts of stacked experts the names of single ones, in families whose files have either form.

    A stack has gates and ups in one tensor, [num_experts, 2 * size, hidden], and downs in another. Some families may
    have their matrices transposed; one that could be either is taken as it is. Raises ModelError for a stack of another
    shape, or a quantized one.
    """
    page, experts = names_of(config), config.parts.experts
    names = page.of_experts
    if experts is None or not names.stacked_gate_up:
        return
    count, size, hidden = experts.num_experts, experts.intermediate_size, config.hidden_size
    for layer in experts.layers:
        module = f"{page.layers}.{layer}.{names.experts}"
        stacks = {
            names.stacked_gate_up: {names.gate: slice(0, size), names.up: slice(size, 2 * size)},
            names.stacked_down: {names.down: slice(0, hidden)},
        }
        for stacked, rows_of in stacks.items():
            name = f"{module}.{stacked}"
            if name in checkpoint:
                rows, features = (2 * size, hidden) if stacked == names.stacked_gate_up else (hidden, size)
                plain, transposed = (count, rows, features), (count, features, rows)
                checkpoint.check(name, FLOATS, (plain, transposed) if names.allows_transposed_stack else (plain,))
                is_transposed = checkpoint.shape(name) != plain
                checkpoint.split(
                    name,
                    {
                        f"{module}.{expert}.{own}.weight": MatrixRows(expert, taken, is_transposed)
                        for expert in range(count)
                        for own, taken in rows_of.items()
                    },
                )
