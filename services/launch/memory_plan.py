"""The plan of memory: what a start will need in each place, against what is free there before anything is loaded.

It reads the headers of the checkpoint and no weights, and needs neither torch nor transformers. What it cannot know
exactly it counts low (buffers of kernels, CUDA graphs), so it refuses no start that could succeed: the workers know the
rest when they have a device, and say it when they allocate.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from services.channel.shm_cleanup import SHM_DIR
from services.common.batch_buckets import batch_buckets, chunk_buckets, token_buckets
from services.common.config import Config
from services.common.encoders.encoder_types import is_encoder_type
from services.common.errors import CapacityError, ConfigError, ModelError
from services.common.families.names import NAMES, CheckpointNames
from services.common.json_files.read_json import read_json
from services.common.process import GPU_STANDBY_BYTES, STANDBY_BYTES, available_bytes
from services.common.rank import Rank
from services.common.several_attention_workers import devices_of_workers
from services.common.shorten import shorten
from services.common.vision.vision_config import VisionConfig, load_vision_config
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE
from services.launch.gpus import find_gpu, is_on_gpu, list_gpus
from services.launch.mps import share_gpu
from services.launch.service_configs import num_gateways

PROCESS_BYTES = 190 * 2**20  # of each worker and gateway with the embedded model on a CPU, without pages of files
CONTEXT_BYTES = 256 * 2**20  # of each worker on a GPU: its context and the libraries' kernels
LEAST_CACHE_BYTES = 16 * 2**20  # a smaller KV cache is not worth a proposal
LEAST_CACHE_FRACTION = 0.01  # nor a smaller part of a GPU
COPY_BYTES = 64 * 2**20  # of a GPU, with a host tier
# Of one layer in one CUDA graph, each kernel's arguments and the driver's records: an H200 needed 49 and 10 KiB
GRAPH_LAYER_BYTES = {"dense": 40 * 2**10, "attention": 8 * 2**10}
DRAFT_BLOCK_SIZE = 64  # tokens of a block of the KV cache of drafts
RANK_STEP = 16  # slots for adapters have room for ranks that are multiples of it
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in its library
_ALL_WINDOWS = {"mistral", "mixtral"}  # families in which every layer has the window of config.json
# Tensors of towers for pictures, and of what is between them and the text; not of heads and norms that some leave out.
_TOWER = re.compile(
    r"(?:model\.)?(?:multi_modal_projector|qformer|query_tokens|language_projection|image_newline"
    r"|(?:visual|vision_tower|vision_model)\.(?!(?:vision_model\.)?(?:head\.|post_layernorm))"
    r"(?:(?:[a-z_]+\.)*(?:blocks|layers?)\.(?P<layer>\d+)\.)?)"
)
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # by the name in a header
_ADAPTED_DTYPES = {*_FLOAT_BYTES, "F8_E4M3", "I8"}  # whose matrices have the shapes of their products
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # by torch's name

MORE = "a smaller or a quantized model, or {excess} bytes more memory, is needed"
Mend = Callable[[int], str | None]  # a setting that saves at least so many bytes, with its value; None: it cannot


@dataclass(frozen=True, slots=True)
class Need:
    """A part of what a start needs in one place."""

    what: str
    num_bytes: int
    mend: Mend = lambda excess: None


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of memory."""

    name: str
    free_bytes: int
    needs: tuple[Need, ...]
    last_mend: str  # if no setting suffices; {excess}: bytes

    @property
    def num_bytes(self) -> int:
        """All that is needed here."""
        return sum(need.num_bytes for need in self.needs)

    def check(self) -> None:
        """Raises `CapacityError`, which says by how much it does not fit, and what would make it fit."""
        excess = self.num_bytes - self.free_bytes
        if excess <= 0:
            return
        mends = [mend for need in self.needs if (mend := need.mend(excess)) is not None]
        parts = ", ".join(f"{need.what} {need.num_bytes}" for need in self.needs)
        raise CapacityError(
            f"{self.name} has {self.free_bytes} bytes free, {self.num_bytes} are needed ({parts}), {excess} too many: "
            + (f"set {' or '.join(mends)}" if mends else self.last_mend.format(excess=excess))
        )


def plan_memory(config: Config, taken_bytes: Callable[[], int] = lambda: 0) -> list[Place]:
    """What the services of `launch.services` need. Raises `ModelError` for a damaged checkpoint or config.json.

    `taken_bytes`: what some of them have of the host already.
    """
    services = config.launch.services
    has_dense, has_attention = DENSE_ROLE in services, ATTENTION_ROLE in services
    is_dense_on_gpu, is_attention_on_gpu = is_on_gpu(config.dense.device), is_on_gpu(config.attention.device)
    weights = list(_weights(config, on_gpu=is_dense_on_gpu)) if has_dense else []
    of_first = [*_drafts(config, on_gpu=is_dense_on_gpu), *_tower(config, on_gpu=is_dense_on_gpu)] if has_dense else []
    tier_bytes, is_tier_in_memory = config.attention.host_kv_bytes, _is_tier_in_memory(config)
    tier = Need("the host tier", _missing_bytes(config), _lower("attention.host_kv_bytes", tier_bytes, 1))
    num_workers, num_ranks = config.attention.workers, config.dense.num_ranks
    tier = _of_each(tier, num_workers * num_ranks)
    has_tier = has_attention and tier_bytes > 0
    tiers = [tier] if has_tier and is_tier_in_memory else []
    host = [*tiers]
    if has_attention and not is_attention_on_gpu:
        num_bytes = config.attention.kv_cache_bytes * num_ranks
        mend = _lower("attention.kv_cache_bytes", num_bytes, LEAST_CACHE_BYTES, num_ranks)
        host.append(_of_each(_blocks(config, on_gpu=False) or Need("the KV cache", num_bytes, mend), num_workers))
    if not is_dense_on_gpu:
        host += weights + of_first
        host += [_workspaces(config, rank=0, num_parts=1)] if has_dense else []
    num_processes = (has_dense + has_attention * config.attention.workers) * num_ranks + num_gateways(config)
    host.append(Need(f"{num_processes} processes", num_processes * PROCESS_BYTES))
    host += _standbys(config)
    places = [Place("host memory", available_bytes() + taken_bytes(), tuple(host), MORE)]
    if has_attention and SHM_DIR.is_dir():
        shared = [*tiers] if is_dense_on_gpu else [*tiers, _of_each(_region(config), num_workers)]
        last = "in a container raise --shm-size by {excess} bytes"
        places.append(Place(f"shared memory {SHM_DIR}", shutil.disk_usage(SHM_DIR).free, tuple(shared), last))
    if has_tier and not is_tier_in_memory:
        directory = config.attention.host_kv_path.absolute().parent
        if directory.is_dir():
            free, last = shutil.disk_usage(directory).free, "set attention.host_kv_path to another disk"
            places.append(Place(f"the disk of {directory}", free, (tier,), last))
    for rank in range(num_ranks):
        of_rank = [*weights, *(of_first if rank == 0 else [])]
        places += _gpus(config, rank, of_rank if has_dense and is_dense_on_gpu else None)
    return places


def _gpus(config: Config, rank: int, weights: list[Need] | None) -> list[Place]:
    """The GPUs of a rank's workers. `weights`: None if the dense worker has no GPU."""
    dense_device, attention_devices = config.dense.device, devices_of_workers(config)
    if ATTENTION_ROLE not in config.launch.services or not is_on_gpu(config.attention.device):
        attention_devices = []
    if config.dense.num_ranks > 1:
        dense_device, attention_devices = f"cuda:{rank}", [f"cuda:{rank}" for _ in attention_devices]
    near = [each for each in attention_devices if weights is not None and share_gpu(dense_device, each)]
    far = Counter(each for each in attention_devices if each not in near)
    of_dense: list[Need] = []
    if weights is not None:
        num_parts = config.dense.tensor_parallel_size
        of_dense = [*weights, *_adapters(config, rank), _workspaces(config, rank=rank, num_parts=num_parts)]
    of_attention = [Need("copies of the host tier", COPY_BYTES)] if config.attention.host_kv_bytes else []
    places = []
    if weights is not None:
        later = [*_graphs(config, "dense"), *_gpu_standbys(config, "dense")]
        if near:
            later += [*_graphs(config, "attention"), *_gpu_standbys(config, "attention")]
        needs = [*of_dense, *(of_attention if near else [])]
        places.append(_gpu(config, dense_device, needs, later, num_dense=1, num_caches=len(near)))
    for device, num_caches in far.items():
        later = [*_graphs(config, "attention"), *_gpu_standbys(config, "attention")]
        places.append(_gpu(config, device, of_attention, later, num_dense=0, num_caches=num_caches))
    return [place for place in places if place is not None]


def _gpu(
    config: Config, device: str, first: list[Need], later: list[Need], *, num_dense: int, num_caches: int
) -> Place | None:
    """A GPU, if it is certain which one it is: what is allocated `first`, the KV caches, and what is `later`."""
    gpu = find_gpu(device, list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpu is None:
        return None
    needs = [*first, Need("contexts", (num_dense + num_caches) * CONTEXT_BYTES)]
    fraction = config.attention.kv_cache_memory_fraction
    left = gpu.free_bytes - sum(need.num_bytes for need in needs)
    if num_caches and (of_blocks := _blocks(config, on_gpu=True)) is not None:
        needs.append(_of_each(of_blocks, num_caches))
    elif num_caches and left > 0:
        num_bytes = int(left * fraction)

        def mend(excess: int) -> str | None:
            fitting = math.floor(100 * (num_bytes - excess) / left) / 100
            key = "attention.kv_cache_memory_fraction"
            return f"{key} to {fitting:g} or less" if fitting >= LEAST_CACHE_FRACTION else None

        needs.append(Need("the KV cache", num_bytes, mend))
    return Place(f"the GPU {gpu.name}, {gpu.uuid},", gpu.free_bytes, (*needs, *later), MORE)


def check_memory(config: Config, taken_bytes: Callable[[], int] = lambda: 0) -> None:
    """Raises `CapacityError` if something will not fit, and `ModelError` for a damaged checkpoint.

    `taken_bytes`: see `plan_memory`. Where several places have too little the error is of the one that lacks most: a
    setting may count in all of them.
    Raises `ConfigError` for more ranks than the model can be dealt to: they are not what memory lacks for.
    """
    _check_dealt(config)
    max(plan_memory(config, taken_bytes), key=lambda place: place.num_bytes - place.free_bytes).check()


def _check_dealt(config: Config) -> None:
    """The workers check the rest, which needs more than config.json, once they know the family."""
    raw = _text_config(config.model.path)
    for setting, count, number, what in (
        ("tensor_parallel_size", config.dense.tensor_parallel_size, _size(raw, "num_attention_heads"), "heads"),
        ("pipeline_parallel_size", config.dense.pipeline_parallel_size, _num_layers(config), "layers"),
    ):
        if 0 < number < count:
            raise ConfigError(
                f"dense.{setting} is {count}, but the model has {number} {what}: set it to {number} or less"
            )


def weight_bytes(path: Path, dtype: str, *, num_layers: int | None = None, to_fp8: bool = False) -> int:
    """Bytes of the weights of a Hugging Face directory in memory; 0 if it has no safetensors or an unknown family.

    dtype: torch's name of what unquantized weights become; "auto": what the file has. With `to_fp8` the matrices of
    layers are made FP8. Layers beyond `num_layers`, other parts than the model of text, and a tied head do not count.
    Raises `ModelError`.
    """
    if is_encoder_type(_text_config(path)):
        return sum(
            math.prod(each.shape) * _ITEM_BYTES.get(dtype, _FLOAT_BYTES.get(each.dtype, 8)) for each in _tensors(path)
        )
    names = _names(path)
    return 0 if names is None else sum(_sizes(path, names, dtype, num_layers, to_fp8))


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    stored_bytes: int


def _weights(config: Config, *, on_gpu: bool) -> Iterator[Need]:
    """Those of the model in one place: on the GPU of each rank its part of them."""
    section, num_parts = config.model, config.dense.num_ranks if on_gpu else 1
    if section.load_format != "safetensors":
        return
    options = {
        "dtype": _weights_dtype(config, on_gpu=on_gpu),
        "num_layers": section.num_layers,
        "to_fp8": config.dense.quantization == "fp8",
    }
    num_bytes = weight_bytes(section.path, **options)
    is_quantized = "quantization_config" in (read_json(section.path / "config.json") or {})

    def mend(excess: int) -> str | None:
        setting, smaller = "model.dtype to bfloat16", {"dtype": "bfloat16"}
        if on_gpu:
            setting, smaller = "dense.quantization to fp8", {"to_fp8": not is_quantized}
        saved = num_bytes - weight_bytes(section.path, **(options | smaller))
        return setting if saved // num_parts >= excess else None

    yield Need(f"the weights of {section.path.name}", num_bytes // num_parts, mend)


def _drafts(config: Config, *, on_gpu: bool) -> Iterator[Need]:
    """The draft model, which the first rank has as a whole, or the heads that draft; and their KV cache."""
    scheduler, dtype = config.scheduler, _weights_dtype(config, on_gpu=on_gpu)
    path = scheduler.draft_model or scheduler.speculation_model
    if path is None:
        return
    if scheduler.draft_model is None:
        what, num_bytes = f"the heads {path.name}", _head_bytes(config, path, dtype)
        if scheduler.speculation == "eagle3" and config.dense.num_ranks > 1:
            num_bytes += _embedding_bytes(config.model.path, path, dtype)
    else:
        what, num_bytes = f"the draft model {path.name}", weight_bytes(path, dtype)
    if config.model.load_format == "safetensors":
        yield Need(what, num_bytes, _off("scheduler.speculation", num_bytes))
    if scheduler.speculation == "medusa":
        return
    raw = read_json(path / "config.json") or {}
    raw = raw.get("transformer_layer_config", raw)  # of a head
    block_bytes = DRAFT_BLOCK_SIZE * _token_bytes(raw, _item_bytes(config, on_gpu=on_gpu))
    if not block_bytes:
        return
    most_tokens = _size(_text_config(config.model.path), "max_position_embeddings")
    longest = min(config.model.max_model_len or most_tokens, _size(raw, "max_position_embeddings") or most_tokens)
    most = 1 + scheduler.max_num_seqs * -(-longest // DRAFT_BLOCK_SIZE)
    cache_bytes = min(scheduler.draft_cache_bytes // block_bytes, most) * block_bytes
    mend = _lower("scheduler.draft_cache_bytes", cache_bytes, 2 * block_bytes)
    yield Need("the KV cache of drafts", cache_bytes, mend)


def _tower(config: Config, *, on_gpu: bool) -> Iterator[Need]:
    """What computes pictures, which the first rank has as a whole."""
    section = config.model
    vision = load_vision_config(section.path) if section.images and section.load_format == "safetensors" else None
    if vision is not None and vision.tower is not None:
        dtype, to_fp8 = _weights_dtype(config, on_gpu=on_gpu), config.dense.quantization == "fp8"
        num_bytes = tower_bytes(section.path, vision, dtype, to_fp8=to_fp8)
        yield Need("the tower for pictures", num_bytes, lambda excess: _no_pictures(num_bytes, excess))


def _no_pictures(num_bytes: int, excess: int) -> str | None:
    return "model.images to false" if num_bytes >= excess else None


def tower_bytes(path: Path, vision: VisionConfig, dtype: str, *, to_fp8: bool = False) -> int:
    """Bytes of a tower's weights in memory, as `weight_bytes` of the text; with `to_fp8` Qwen's layers are FP8."""
    assert vision.tower is not None, "the model has a tower"
    num_bytes = 0
    for tensor in _tensors(path):
        name = _TOWER.match(tensor.name)
        layer = name and name["layer"]
        if name is None or (layer is not None and int(layer) >= vision.tower.num_layers):
            continue
        is_fp8 = to_fp8 and layer is not None and len(tensor.shape) > 1 and vision.family.startswith("qwen")
        item_bytes = 1 if is_fp8 else _ITEM_BYTES.get(dtype, _FLOAT_BYTES.get(tensor.dtype, 0))
        num_bytes += math.prod(tensor.shape) * item_bytes
    return num_bytes


def _head_bytes(config: Config, path: Path, dtype: str) -> int:
    """Bytes of Medusa's or EAGLE-3's heads; of Medusa's only as many are loaded as there are drafts."""
    is_medusa = config.scheduler.speculation == "medusa"
    own_file = path / "medusa_lm_head.safetensors"
    num_bytes = 0
    for tensor in _tensors(path, own_file if is_medusa and own_file.is_file() else path / "model.safetensors"):
        head = re.search(r"\d+", tensor.name)  # the first number of Medusa's names
        is_loaded = not (is_medusa and head) or int(head[0]) < config.scheduler.num_speculative_tokens
        if tensor.dtype in _FLOAT_BYTES and is_loaded:
            num_bytes += math.prod(tensor.shape) * _ITEM_BYTES.get(dtype, _FLOAT_BYTES[tensor.dtype])
    return num_bytes


def _embedding_bytes(path: Path, heads: Path, dtype: str) -> int:
    """Bytes of the model's whole embedding, which a rank with a part of it has, too, for heads that have none."""
    names = _names(path)
    if names is None or any(each.name == "embed_tokens.weight" for each in _tensors(heads)):
        return 0
    found = [each for each in _tensors(path) if names.canonical(each.name) == f"{names.embedding}.weight"]
    return sum(math.prod(each.shape) * _ITEM_BYTES.get(dtype, _FLOAT_BYTES.get(each.dtype, 0)) for each in found)


def _blocks(config: Config, *, on_gpu: bool) -> Need | None:
    """The KV cache if `attention.num_blocks` says its size: of one GPU, or of all ranks together. None: it does not."""
    section = config.attention
    if section.num_blocks is None:
        return None
    raw, item_bytes = _text_config(config.model.path), _item_bytes(config, on_gpu=on_gpu)
    num_scales = 0
    if section.kv_cache_dtype in ("fp8", "int8"):
        item_bytes, num_scales = 1, int(section.kv_cache_dtype == "int8")
    elif section.kv_cache_dtype == "auto" and "kv_cache_scheme" in (raw.get("quantization_config") or {}):
        item_bytes = 1
    num_parts, num_stages = config.dense.tensor_parallel_size, config.dense.pipeline_parallel_size
    token_bytes = _token_bytes(raw, item_bytes, num_scales, config.model.num_layers, num_parts)
    block_bytes = section.block_size * (token_bytes // num_stages if on_gpu else token_bytes * num_parts)

    def mend(excess: int) -> str | None:
        fitting = section.num_blocks - -(-excess // block_bytes) if block_bytes else 0
        return f"attention.num_blocks to {fitting} or less" if fitting > 0 else None

    return Need(f"{section.num_blocks} blocks of the KV cache", section.num_blocks * block_bytes, mend)


def _token_bytes(
    raw: dict[str, Any], item_bytes: int, num_scales: int = 0, num_layers: int | None = None, num_parts: int = 1
) -> int:
    """Bytes of a token's keys and values in the layers that keep all of them; 0 if config.json has other fields.

    num_scales: of four bytes, beside each head's keys and its values. num_parts: into which the heads are cut; fewer
    heads than parts are copied.
    """
    depth, kinds = _depth(raw, num_layers), raw.get("layer_types")
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
        return depth * (_size(raw, "kv_lora_rank") + _size(raw, "qk_rope_head_dim")) * item_bytes
    heads, kv_heads = _size(raw, "num_attention_heads"), _size(raw, "num_key_value_heads")
    if not heads or not kv_heads:
        return 0
    head_dim = _size(raw, "head_dim") or _size(raw, "hidden_size") // heads
    return depth * 2 * max(1, kv_heads // num_parts) * (head_dim * item_bytes + 4 * num_scales)


def _weights_dtype(config: Config, *, on_gpu: bool) -> str:
    return config.model.dtype if on_gpu or config.model.dtype != "auto" else "float32"


def _item_bytes(config: Config, *, on_gpu: bool) -> int:
    """Bytes of a number in the model's dtype."""
    dtype, raw = _weights_dtype(config, on_gpu=on_gpu), _text_config(config.model.path)
    return _ITEM_BYTES.get(dtype) or _ITEM_BYTES.get(raw.get("dtype") or raw.get("torch_dtype"), 2)


def _standbys(config: Config) -> Iterator[Need]:
    """What the standbys of each rank that were asked for must find; `auto` takes what there is."""
    num_bytes = config.dense.num_ranks * STANDBY_BYTES
    for role, key in ((DENSE_ROLE, "standby_dense"), (ATTENTION_ROLE, "standby_attention")):
        if role in config.launch.services and getattr(config.launch, key) not in ("auto", "off"):
            yield Need("a standby", num_bytes, _off(f"launch.{key}", num_bytes))
            return  # both workers' start one after the other, and take much less than must be free


def _gpu_standbys(config: Config, section: str) -> Iterator[Need]:
    """What a standby on a GPU must find, once the KV cache is there."""
    role, key = {"dense": DENSE_ROLE, "attention": ATTENTION_ROLE}[section], f"launch.standby_{section}"
    asked = getattr(config.launch, f"standby_{section}")
    if role in config.launch.services and asked not in ("auto", "off"):
        num_bytes = GPU_STANDBY_BYTES if asked == "loaded" else CONTEXT_BYTES
        yield Need(f"a standby of the {section} worker", num_bytes, _off(key, num_bytes))


def _workspaces(config: Config, *, rank: int, num_parts: int) -> Need:
    """The buffers of the largest step of each lane in a rank's dense worker: logits, and what lives within a layer.

    Logits are those of the first rank, and the activations of an MLP are cut into `num_parts`.
    """
    raw, scheduler = _text_config(config.model.path), config.scheduler
    width = _size(raw, "hidden_size") + 2 * _size(raw, "intermediate_size") // num_parts
    item_bytes = _ITEM_BYTES.get(config.model.dtype, 2)
    token_bytes = width * item_bytes * scheduler.num_lanes
    # As the model gives them, and as they are edited.
    logits = scheduler.max_num_seqs * _size(raw, "vocab_size") * (item_bytes + _ITEM_BYTES["float32"])
    logits *= scheduler.num_lanes
    num_bytes = (logits if rank == 0 else 0) + scheduler.max_num_batched_tokens * token_bytes

    def mend(excess: int) -> str | None:
        fitting = scheduler.max_num_batched_tokens - -(-excess // token_bytes) if token_bytes else 0
        is_enough = fitting >= scheduler.max_num_seqs
        return f"scheduler.max_num_batched_tokens to {fitting} or less" if is_enough else None

    return Need("the buffers of a step", num_bytes, mend)


def _adapters(config: Config, rank: int) -> Iterator[Need]:
    """Slots for adapters on a rank's GPU: two matrices for each one of a layer. None are counted for packed weights.

    One of the two is cut over tensor ranks, by the side by which the layer's own matrix is cut.
    """
    section = config.dense
    names = _names(config.model.path) if section.max_loras else None
    if names is None:
        return
    num_columns = -(-section.max_lora_rank // RANK_STEP) * RANK_STEP
    layers = Rank.of(section, rank).layers(_num_layers(config))
    slot_bytes = 0
    for tensor in _tensors(config.model.path):
        layer = names.layer_of(names.canonical(tensor.name))
        is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight") and ".experts." not in tensor.name
        if is_matrix and tensor.dtype in _ADAPTED_DTYPES and layer is not None and layer in layers:
            size_out, size_in = tensor.shape
            if names.canonical(tensor.name).endswith((f".{names.o}.weight", f".{names.down}.weight")):
                size_in //= section.tensor_parallel_size
            else:
                size_out //= section.tensor_parallel_size
            slot_bytes += num_columns * (size_out + size_in) * _ITEM_BYTES.get(config.model.dtype, 2)

    def mend(excess: int) -> str | None:
        fitting = section.max_loras - -(-excess // slot_bytes) if slot_bytes else -1
        return f"dense.max_loras to {fitting} or less" if fitting >= 0 else None

    yield Need(f"{section.max_loras} adapters of rank {num_columns}", section.max_loras * slot_bytes, mend)


def _graphs(config: Config, section: str) -> Iterator[Need]:
    """The CUDA graphs that a worker captures at its start, once the KV cache is there."""
    if getattr(config, section).captures_lazily:
        return
    scheduler = config.scheduler
    sizes = batch_buckets(scheduler.max_num_seqs) + chunk_buckets(scheduler.max_num_batched_tokens)
    if section == "dense":
        sizes = token_buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    num_graphs = len(sizes) * scheduler.num_lanes
    num_bytes = num_graphs * _num_layers(config) * GRAPH_LAYER_BYTES[section]
    what = f"{num_graphs} CUDA graphs of the {section} worker"
    yield Need(what, num_bytes, lambda excess: f"{section}.captures_lazily to true" if num_bytes >= excess else None)


def _region(config: Config) -> Need:
    """Where the two workers meet on a CPU; without the rows if config.json spells the sizes of attention otherwise."""
    raw = _text_config(config.model.path)
    most, fewest = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    try:
        heads, is_usual = int(raw["num_attention_heads"]), not {"kv_lora_rank", "linear_num_value_heads"} & raw.keys()
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        token_bytes = is_usual * 2 * (heads + int(raw.get("num_key_value_heads") or heads)) * head_dim
    except (LookupError, TypeError, ValueError, ArithmeticError):
        token_bytes = 0
    token_bytes *= _ITEM_BYTES.get(config.model.dtype, 4) * config.scheduler.num_lanes

    def mend(excess: int) -> str | None:
        fitting = most - -(-excess // token_bytes) if token_bytes else 0
        return f"scheduler.max_num_batched_tokens to {fitting} or less" if fitting >= fewest else None

    return Need("what the workers exchange", most * token_bytes, mend)


def _is_tier_in_memory(config: Config) -> bool:
    path = config.attention.host_kv_path
    return path is None or SHM_DIR in path.absolute().parents


def _missing_bytes(config: Config) -> int:
    """What the file of the host tier still has to take."""
    path = config.attention.host_kv_path
    held = path.stat().st_blocks * 512 if path is not None and path.is_file() else 0
    return max(0, config.attention.host_kv_bytes - held)


def _lower(key: str, value: int, least: int, count: int = 1) -> Mend:
    """`value`: of `count` processes together, of which each has what the key says."""

    def mend(excess: int) -> str | None:
        fitting = (value - excess) // count
        return f"{key} to {fitting} or less" if fitting >= least else None

    return mend


def _of_each(need: Need, count: int) -> Need:
    """What `count` attention workers need, of which each needs this."""
    if count == 1:
        return need
    what = f"{need.what} of {count} workers"
    return Need(what, need.num_bytes * count, lambda excess: need.mend(-(-excess // count)))


def _off(key: str, num_bytes: int) -> Mend:
    return lambda excess: f"{key} to off" if num_bytes >= excess else None


def _text_config(path: Path) -> dict[str, Any]:
    raw = read_json(path / "config.json") or {}
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def _size(raw: dict[str, Any], key: str) -> int:
    """A size of config.json; 0 for a family that spells it otherwise."""
    value = raw.get(key)
    return value if type(value) is int else 0


def _depth(raw: dict[str, Any], num_layers: int | None) -> int:
    """The number of layers that run."""
    depth = next((raw[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if type(raw.get(key)) is int), 0)
    return depth if num_layers is None else min(num_layers, depth)


def _num_layers(config: Config) -> int:
    return _depth(_text_config(config.model.path), config.model.num_layers)


def _names(path: Path) -> CheckpointNames | None:
    family = _text_config(path).get("model_type")
    return NAMES.get(family) if isinstance(family, str) else None


def _sizes(path: Path, names: CheckpointNames, dtype: str, num_layers: int | None, to_fp8: bool) -> Iterator[int]:
    """Bytes in memory of each tensor that the model of text has."""
    raw = _text_config(path)
    most = _depth(raw, num_layers)
    whole = {names.embedding, names.embedding_norm, names.positions, names.final_norm, names.layer_inputs}
    whole |= {names.layer_inputs_projection, names.layer_inputs_norm}
    if not raw.get("tie_word_embeddings"):
        whole.add(names.head)
    for tensor in _tensors(path):
        name = names.canonical(tensor.name)
        layer = names.layer_of(name)
        if "zero" in name or name.endswith("g_idx"):
            continue  # smaller in memory
        if (layer is None or layer >= most) and re.sub(r"\.(weight|bias)$", "", name) not in whole:
            continue
        if tensor.dtype not in _FLOAT_BYTES:
            yield tensor.stored_bytes
        elif "scale" in name:
            yield min(tensor.stored_bytes, 2 * math.prod(tensor.shape))  # formats differ
        else:
            is_fp8 = to_fp8 and layer is not None and len(tensor.shape) > 1
            item_bytes = 1 if is_fp8 else _ITEM_BYTES.get(dtype, _FLOAT_BYTES[tensor.dtype])
            yield math.prod(tensor.shape) * item_bytes


def _tensors(path: Path, single: Path | None = None) -> Iterator[_Tensor]:
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
                    yield _Tensor(name, dtype, shape, end - start)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{file} is missing, truncated or damaged: {error}") from error
