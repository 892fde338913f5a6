"""The plan of memory: what a start will need in each place, against what is free there before anything is loaded.

It reads the headers of the checkpoint and no weights, and needs neither torch nor transformers. It counts what is
certain and leaves out what depends on kernels (buffers of a step, CUDA graphs), so it refuses no start that could
succeed: the workers know the rest when they have a device, and say it when they allocate.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from services.channel.shm_cleanup import SHM_DIR
from services.common.config import Config
from services.common.errors import CapacityError, ModelError
from services.common.families.names import NAMES, CheckpointNames
from services.common.json_files.read_json import read_json
from services.common.process import STANDBY_BYTES, available_bytes
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE
from services.launch.gpus import find_gpu, is_on_gpu, list_gpus
from services.launch.mps import share_gpu
from services.launch.service_configs import num_gateways

PROCESS_BYTES = 190 * 2**20  # of each worker and gateway with the embedded model on a CPU, without pages of files
CONTEXT_BYTES = 256 * 2**20  # of each worker on a GPU: its context and the libraries' kernels
LEAST_CACHE_BYTES = 16 * 2**20  # a smaller KV cache is not worth a proposal
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in its library
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # by the name in a header
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # by torch's name

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


def plan_memory(config: Config) -> list[Place]:
    """What the services of `launch.services` need. Raises `ModelError` for a checkpoint or config.json that is damaged.
    """
    services = config.launch.services
    has_dense, has_attention = DENSE_ROLE in services, ATTENTION_ROLE in services
    is_dense_on_gpu, is_attention_on_gpu = is_on_gpu(config.dense.device), is_on_gpu(config.attention.device)
    weights = list(_weights(config, on_gpu=is_dense_on_gpu)) if has_dense else []
    tier_bytes, is_tier_in_memory = config.attention.host_kv_bytes, _is_tier_in_memory(config)
    tier = Need("the host tier", _missing_bytes(config), _lower("attention.host_kv_bytes", tier_bytes, 1))
    tiers = [tier] if has_attention and tier_bytes and is_tier_in_memory else []
    host = [*tiers]
    if has_attention and not is_attention_on_gpu and config.attention.num_blocks is None:
        num_bytes = config.attention.kv_cache_bytes
        host.append(Need("the KV cache", num_bytes, _lower("attention.kv_cache_bytes", num_bytes, LEAST_CACHE_BYTES)))
    if not is_dense_on_gpu:
        host += weights
    num_processes = has_dense + has_attention + num_gateways(config)
    host.append(Need(f"{num_processes} processes", num_processes * PROCESS_BYTES))
    host += _standbys(config)
    more = "a smaller or a quantized model, or {excess} bytes more memory, is needed"
    places = [Place("host memory", available_bytes(), tuple(host), more)]
    if has_attention and SHM_DIR.is_dir():
        shared = [*tiers] if is_dense_on_gpu else [*tiers, _region(config)]
        last = "in a container raise --shm-size by {excess} bytes"
        places.append(Place(f"shared memory {SHM_DIR}", shutil.disk_usage(SHM_DIR).free, tuple(shared), last))
    if has_dense and is_dense_on_gpu:
        gpu = find_gpu(config.dense.device, list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        if gpu is not None:
            num_workers = 1 + (has_attention and share_gpu(config.dense.device, config.attention.device))
            needs = (*weights, Need("contexts", num_workers * CONTEXT_BYTES))
            places.append(Place(f"the GPU {gpu.name}, {gpu.uuid},", gpu.free_bytes, needs, more))
    return places


def check_memory(config: Config) -> None:
    """Raises `CapacityError` if something will not fit, and `ModelError` for a damaged checkpoint.

    Where several places have too little the error is of the one that lacks most: a setting may count in all of them.
    """
    max(plan_memory(config), key=lambda place: place.num_bytes - place.free_bytes).check()


def weight_bytes(path: Path, dtype: str, *, num_layers: int | None = None, to_fp8: bool = False) -> int:
    """Bytes of the weights of a Hugging Face directory in memory; 0 if it has no safetensors or an unknown family.

    dtype: torch's name of what unquantized weights become; "auto": what the file has. With `to_fp8` the matrices of
    layers are made FP8. Layers beyond `num_layers`, other parts than the model of text, and a tied head do not count.
    Raises `ModelError`.
    """
    names = _names(path)
    return 0 if names is None else sum(_sizes(path, names, dtype, num_layers, to_fp8))


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    stored_bytes: int


def _weights(config: Config, *, on_gpu: bool) -> Iterator[Need]:
    section, scheduler = config.model, config.scheduler
    if section.load_format != "safetensors":
        return
    options = {
        "dtype": section.dtype if on_gpu or section.dtype != "auto" else "float32",
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
        return setting if saved >= excess else None

    yield Need(f"the weights of {section.path.name}", num_bytes, mend)
    if scheduler.draft_model is not None:
        drafts = weight_bytes(scheduler.draft_model, options["dtype"])
        yield Need(f"the draft model {scheduler.draft_model.name}", drafts, _off("scheduler.speculation", drafts))


def _standbys(config: Config) -> Iterator[Need]:
    """What a standby that was asked for must find; `auto` takes what there is."""
    for role, key in ((DENSE_ROLE, "standby_dense"), (ATTENTION_ROLE, "standby_attention")):
        if role in config.launch.services and getattr(config.launch, key) not in ("auto", "off"):
            yield Need("a standby", STANDBY_BYTES, _off(f"launch.{key}", STANDBY_BYTES))
            return  # they start one after the other, and take much less than must be free


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
    token_bytes *= _ITEM_BYTES.get(config.model.dtype, 4)

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


def _lower(key: str, value: int, least: int) -> Mend:
    return lambda excess: f"{key} to {value - excess} or less" if value - excess >= least else None


def _off(key: str, num_bytes: int) -> Mend:
    return lambda excess: f"{key} to off" if num_bytes >= excess else None


def _text_config(path: Path) -> dict[str, Any]:
    raw = read_json(path / "config.json") or {}
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def _names(path: Path) -> CheckpointNames | None:
    family = _text_config(path).get("model_type")
    return NAMES.get(family) if isinstance(family, str) else None


def _sizes(path: Path, names: CheckpointNames, dtype: str, num_layers: int | None, to_fp8: bool) -> Iterator[int]:
    """Bytes in memory of each tensor that the model of text has."""
    raw = _text_config(path)
    depth = next((raw[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if type(raw.get(key)) is int), 0)
    most = depth if num_layers is None else min(num_layers, depth)
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


def _tensors(path: Path) -> Iterator[_Tensor]:
    """All tensors of the files that a worker opens: a single file, or those of an index."""
    single = path / "model.safetensors"
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
                    start, end = entry["data_offsets"]
                    if 8 + num_bytes + end > size:
                        raise ValueError(f"{name} ends at byte {8 + num_bytes + end} of {size}")
                    yield _Tensor(name, entry["dtype"], entry["shape"], end - start)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{file} is missing, truncated or damaged: {error}") from error
