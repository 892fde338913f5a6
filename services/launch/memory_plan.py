"""The plan of memory: what a start will need in each place, against what is free there before anything is loaded.

It reads the headers of the checkpoint and no weights, and needs neither torch nor transformers. What it cannot know
exactly it counts low (buffers of kernels, CUDA graphs), so it refuses no start that could succeed: the workers know the
rest when they have a device, and say it when they allocate.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.channel.region import SHM_DIR
from services.common.batch_buckets import batch_buckets, chunk_buckets, token_buckets
from services.common.config import Config
from services.common.errors import CapacityError, ConfigError
from services.common.json_files.read_json import read_json
from services.common.process import GPU_STANDBY_BYTES, STANDBY_BYTES, available_bytes
from services.common.rank import Rank
from services.common.several_attention_workers import devices_of_workers
from services.common.vision.vision_config import load_vision_config
from services.launch.checkpoint_bytes import (
    FLOAT_BYTES,
    ITEM_BYTES,
    depth_of,
    embedding_bytes,
    head_bytes,
    names_in,
    read_tensors,
    read_text_config,
    size_in,
    token_bytes,
    tower_bytes,
    weight_bytes,
)
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE
from services.launch.gpus import find_gpu, is_on_gpu, list_gpus
from services.launch.mps import share_gpu
from services.launch.service_configs import num_gateways

PROCESS_BYTES = 190 * 2**20  # of each worker and gateway with the embedded model on a CPU, without pages of files
CONTEXT_BYTES = 256 * 2**20  # of each worker on a GPU: its context and the libraries' kernels
LEAST_CACHE_BYTES = 16 * 2**20  # a smaller KV cache is not worth a proposal
LEAST_CACHE_FRACTION = 0.01  # nor a smaller part of a GPU
COPY_BYTES = 256 * 2**20  # of a GPU, with a host tier
# Of one layer in one CUDA graph, each kernel's arguments and the driver's records: an H200 needed 49 and 10 KiB
GRAPH_LAYER_BYTES = {"dense": 40 * 2**10, "attention": 8 * 2**10}
DRAFT_BLOCK_SIZE = 64  # tokens of a block of the KV cache of drafts
RANK_STEP = 16  # slots for adapters have room for ranks that are multiples of it
_ADAPTED_DTYPES = {*FLOAT_BYTES, "F8_E4M3", "I8"}  # whose matrices have the shapes of their products

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
    tier = Need("the host tier", _missing_bytes(config), _lower("attention.host_kv_bytes", tier_bytes))
    num_workers, num_ranks = config.attention.workers, config.dense.num_ranks
    tier = _of_each(tier, num_workers * num_ranks)
    has_tier = has_attention and tier_bytes > 0
    tiers = [tier] if has_tier and is_tier_in_memory else []
    host = [*tiers]
    if has_attention and not is_attention_on_gpu:
        cache_bytes = config.attention.kv_cache_bytes
        mend = _lower("attention.kv_cache_bytes", cache_bytes, num_ranks, least=LEAST_CACHE_BYTES)
        cache = _blocks(config, on_gpu=False) or Need("the KV cache", cache_bytes * num_ranks, mend)
        host.append(_of_each(cache, num_workers))
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
    raw = read_text_config(config.model.path)
    for setting, count, number, what in (
        ("tensor_parallel_size", config.dense.tensor_parallel_size, size_in(raw, "num_attention_heads"), "heads"),
        ("pipeline_parallel_size", config.dense.pipeline_parallel_size, _num_layers(config), "layers"),
    ):
        if 0 < number < count:
            raise ConfigError(
                f"dense.{setting} is {count}, but the model has {number} {what}: set it to {number} or less"
            )


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
        num_medusa_heads = scheduler.num_speculative_tokens if scheduler.speculation == "medusa" else None
        what, num_bytes = f"the heads {path.name}", head_bytes(path, dtype, num_medusa_heads)
        if scheduler.speculation == "eagle3" and config.dense.num_ranks > 1:
            num_bytes += embedding_bytes(config.model.path, path, dtype)
    else:
        what, num_bytes = f"the draft model {path.name}", weight_bytes(path, dtype)
    if config.model.load_format == "safetensors":
        yield Need(what, num_bytes, _instead("scheduler.speculation to off", num_bytes))
    if scheduler.speculation == "medusa":
        return
    raw = read_json(path / "config.json") or {}
    raw = raw.get("transformer_layer_config", raw)  # of a head
    block_bytes = DRAFT_BLOCK_SIZE * token_bytes(raw, _item_bytes(config, on_gpu=on_gpu))
    if not block_bytes:
        return
    most_tokens = size_in(read_text_config(config.model.path), "max_position_embeddings")
    longest = min(config.model.max_model_len or most_tokens, size_in(raw, "max_position_embeddings") or most_tokens)
    most = 1 + scheduler.max_num_seqs * -(-longest // DRAFT_BLOCK_SIZE)
    cache_bytes = min(scheduler.draft_cache_bytes // block_bytes, most) * block_bytes
    mend = _lower("scheduler.draft_cache_bytes", cache_bytes, least=2 * block_bytes)
    yield Need("the KV cache of drafts", cache_bytes, mend)


def _tower(config: Config, *, on_gpu: bool) -> Iterator[Need]:
    """What computes pictures, which the first rank has as a whole."""
    section = config.model
    vision = load_vision_config(section.path) if section.images and section.load_format == "safetensors" else None
    if vision is not None and vision.tower is not None:
        dtype, to_fp8 = _weights_dtype(config, on_gpu=on_gpu), config.dense.quantization == "fp8"
        num_bytes = tower_bytes(section.path, vision, dtype, to_fp8=to_fp8)
        yield Need("the tower for pictures", num_bytes, _instead("model.images to false", num_bytes))


def _blocks(config: Config, *, on_gpu: bool) -> Need | None:
    """The KV cache if `attention.num_blocks` says its size: of one GPU, or of all ranks together. None: it does not."""
    section = config.attention
    if section.num_blocks is None:
        return None
    raw, item_bytes = read_text_config(config.model.path), _item_bytes(config, on_gpu=on_gpu)
    num_scales = 0
    if section.kv_cache_dtype in ("fp8", "int8"):
        item_bytes, num_scales = 1, int(section.kv_cache_dtype == "int8")
    elif section.kv_cache_dtype == "auto" and "kv_cache_scheme" in (raw.get("quantization_config") or {}):
        item_bytes = 1
    num_parts, num_stages = config.dense.tensor_parallel_size, config.dense.pipeline_parallel_size
    bytes_per_token = token_bytes(raw, item_bytes, num_scales, config.model.num_layers, num_parts)
    block_bytes = section.block_size * (bytes_per_token // num_stages if on_gpu else bytes_per_token * num_parts)
    mend = _lower("attention.num_blocks", section.num_blocks, block_bytes)
    return Need(f"{section.num_blocks} blocks of the KV cache", section.num_blocks * block_bytes, mend)


def _weights_dtype(config: Config, *, on_gpu: bool) -> str:
    return config.model.dtype if on_gpu or config.model.dtype != "auto" else "float32"


def _item_bytes(config: Config, *, on_gpu: bool) -> int:
    """Bytes of a number in the model's dtype."""
    dtype, raw = _weights_dtype(config, on_gpu=on_gpu), read_text_config(config.model.path)
    return ITEM_BYTES.get(dtype) or ITEM_BYTES.get(raw.get("dtype") or raw.get("torch_dtype"), 2)


def _standbys(config: Config) -> Iterator[Need]:
    """What the standbys of each rank that were asked for must find; `auto` takes what there is."""
    num_bytes = config.dense.num_ranks * STANDBY_BYTES
    for role, key in ((DENSE_ROLE, "standby_dense"), (ATTENTION_ROLE, "standby_attention")):
        if role in config.launch.services and getattr(config.launch, key) not in ("auto", "off"):
            yield Need("a standby", num_bytes, _instead(f"launch.{key} to off", num_bytes))
            return  # both workers' start one after the other, and take much less than must be free


def _gpu_standbys(config: Config, section: str) -> Iterator[Need]:
    """What a standby on a GPU must find, once the KV cache is there."""
    role, key = {"dense": DENSE_ROLE, "attention": ATTENTION_ROLE}[section], f"launch.standby_{section}"
    asked = getattr(config.launch, f"standby_{section}")
    if role in config.launch.services and asked not in ("auto", "off"):
        num_bytes = GPU_STANDBY_BYTES if asked == "loaded" else CONTEXT_BYTES
        yield Need(f"a standby of the {section} worker", num_bytes, _instead(f"{key} to off", num_bytes))


def _workspaces(config: Config, *, rank: int, num_parts: int) -> Need:
    """The buffers of the largest step of each lane in a rank's dense worker: logits, and what lives within a layer.

    Logits are those of the first rank, and the activations of an MLP are cut into `num_parts`.
    """
    raw, scheduler = read_text_config(config.model.path), config.scheduler
    width = size_in(raw, "hidden_size") + 2 * size_in(raw, "intermediate_size") // num_parts
    item_bytes = ITEM_BYTES.get(config.model.dtype, 2)
    bytes_per_token = width * item_bytes * scheduler.num_lanes
    # As the model gives them, and as they are edited.
    logits = scheduler.max_num_seqs * size_in(raw, "vocab_size") * (item_bytes + ITEM_BYTES["float32"])
    logits *= scheduler.num_lanes
    num_bytes = (logits if rank == 0 else 0) + scheduler.max_num_batched_tokens * bytes_per_token
    return Need("the buffers of a step", num_bytes, _smaller_steps(config, bytes_per_token))


def _adapters(config: Config, rank: int) -> Iterator[Need]:
    """Slots for adapters on a rank's GPU: two matrices for each one of a layer. None are counted for packed weights.

    One of the two is cut over tensor ranks, by the side by which the layer's own matrix is cut.
    """
    section = config.dense
    names = names_in(config.model.path) if section.max_loras else None
    if names is None:
        return
    num_columns = -(-section.max_lora_rank // RANK_STEP) * RANK_STEP
    layers = Rank.of(section, rank).layers(_num_layers(config))
    slot_bytes = 0
    for tensor in read_tensors(config.model.path):
        layer = names.layer_of(names.canonical(tensor.name))
        is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight") and ".experts." not in tensor.name
        if is_matrix and tensor.dtype in _ADAPTED_DTYPES and layer is not None and layer in layers:
            size_out, size_in = tensor.shape
            if names.canonical(tensor.name).endswith((f".{names.o}.weight", f".{names.down}.weight")):
                size_in //= section.tensor_parallel_size
            else:
                size_out //= section.tensor_parallel_size
            slot_bytes += num_columns * (size_out + size_in) * ITEM_BYTES.get(config.model.dtype, 2)
    mend = _lower("dense.max_loras", section.max_loras, slot_bytes, least=0)
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
    yield Need(what, num_bytes, _instead(f"{section}.captures_lazily to true", num_bytes))


def _region(config: Config) -> Need:
    """Where the two workers meet on a CPU; without the rows if config.json spells the sizes of attention otherwise."""
    raw = read_text_config(config.model.path)
    try:
        heads, is_usual = int(raw["num_attention_heads"]), not {"kv_lora_rank", "linear_num_value_heads"} & raw.keys()
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        bytes_per_token = is_usual * 2 * (heads + int(raw.get("num_key_value_heads") or heads)) * head_dim
    except (LookupError, TypeError, ValueError, ArithmeticError):
        bytes_per_token = 0
    bytes_per_token *= ITEM_BYTES.get(config.model.dtype, 4) * config.scheduler.num_lanes
    num_bytes = config.scheduler.max_num_batched_tokens * bytes_per_token
    return Need("what the workers exchange", num_bytes, _smaller_steps(config, bytes_per_token))


def _is_tier_in_memory(config: Config) -> bool:
    path = config.attention.host_kv_path
    return path is None or SHM_DIR in path.absolute().parents


def _missing_bytes(config: Config) -> int:
    """What the file of the host tier still has to take."""
    path = config.attention.host_kv_path
    held = path.stat().st_blocks * 512 if path is not None and path.is_file() else 0
    return max(0, config.attention.host_kv_bytes - held)


def _lower(key: str, value: int, unit_bytes: int = 1, *, least: int = 1) -> Mend:
    """A setting whose value takes so many bytes for each unit, in all processes; 0: that is not known."""

    def mend(excess: int) -> str | None:
        fitting = value - -(-excess // unit_bytes) if unit_bytes else -1
        return f"{key} to {fitting} or less" if fitting >= least else None

    return mend


def _of_each(need: Need, count: int) -> Need:
    """What `count` attention workers need, of which each needs this."""
    if count == 1:
        return need
    what = f"{need.what} of {count} workers"
    return Need(what, need.num_bytes * count, lambda excess: need.mend(-(-excess // count)))


def _smaller_steps(config: Config, bytes_per_token: int) -> Mend:
    scheduler = config.scheduler
    key, most = "scheduler.max_num_batched_tokens", scheduler.max_num_batched_tokens
    return _lower(key, most, bytes_per_token, least=scheduler.max_num_seqs)


def _instead(setting: str, num_bytes: int) -> Mend:
    """A setting that saves all of a need."""
    return lambda excess: setting if num_bytes >= excess else None


def _num_layers(config: Config) -> int:
    return depth_of(read_text_config(config.model.path), config.model.num_layers)


