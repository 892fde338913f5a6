"""What a start needs of memory, and what is said if that does not fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.attn_worker.cache.make_spec import StepLimits, make_cache_spec
from services.channel.region import NAME_PREFIX, SHM_DIR
from services.common.config import EMBEDDED_MODEL, Config, load_config
from services.common.errors import CapacityError, ConfigError, ModelError
from services.common.model_config import load_model_config
from services.common.quantization.schemes import fp8_towers
from services.common.rank import Rank
from services.common.resolve import resolve_model
from services.common.vision.vision_config import load_vision_config
from services.dense_worker import standby
from services.dense_worker.build import resolve_dense_model
from services.dense_worker.encoders.vision.load import StoredTower
from services.dense_worker.features.drafting.eagle.load_eagle import find_eagle_head, make_eagle_model
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.model.weights import empty_weights, whole_embedding
from services.dense_worker.parameters import parts_of_type
from services.launch import memory_plan
from services.launch.checkpoint_bytes import tower_bytes, weight_bytes
from services.launch.early_services import EarlyServices
from services.launch.gpus import Gpu
from services.launch.memory_plan import Need, check_memory, plan_memory
from tests.support.cluster import REPOSITORY
from tests.support.dense import medusa_heads
from tests.support.dense.eagle_head import config_of, in_layout_of_vllm, random_head, write_head
from tests.support.dense.family_models import load_true_model, make_family_model
from tests.support.dense.vision_models import make_vision_model
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir
from tests.support.warm_process import run_warm

CPU = ("dense.device=cpu", "attention.device=cpu")
GIB = 2**30


@pytest.mark.parametrize("variant", ["gpt2", "falcon-7b", "mixtral", "opt", "gpt_oss", "qwen3_next"])
def test_the_weights_are_those_of_hugging_face(variant: str, tmp_path: Path) -> None:
    path = make_family_model(tmp_path, variant)
    assert weight_bytes(path, "float32") == 4 * sum(each.numel() for each in load_true_model(path).parameters())
    assert weight_bytes(path, "bfloat16") * 2 == weight_bytes(path, "float32")


@pytest.mark.parametrize("name", ["fp8 blocks", "int8 channel, token", "mxfp4", "awq g32", "gptq g32, act-order"])
def test_quantized_weights_are_those_of_the_worker(name: str, tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    quantize_model_dir(path, FORMATS[name])
    config = load_config(None, [f"model.path={path}", "model.dtype=bfloat16", *CPU])
    exact, planned = standby.weight_bytes(resolve_dense_model(config)), weight_bytes(path, "bfloat16")
    assert exact * 0.95 < planned <= exact


@pytest.mark.parametrize("variant", ["blip2", "gemma3", "internvl_6b", "llava", "llava_siglip", "mistral3", "qwen3_vl"])
@pytest.mark.parametrize("to_fp8", [False, True], ids=["plain", "fp8"])
def test_the_tower_is_that_of_the_worker(variant: str, to_fp8: bool, tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, variant)
    vision = load_vision_config(path)
    assert vision is not None
    asked = fp8_towers() if to_fp8 and variant == "qwen3_vl" else None
    exact = StoredTower(vision, path, torch.bfloat16, torch.device("cpu"), None, asked).num_bytes
    planned = tower_bytes(path, vision, "bfloat16", to_fp8=to_fp8)
    assert 0.95 * exact < planned <= exact


def _host_needs(settings: list[str]) -> list[Need]:
    return list(plan_memory(load_config(None, settings))[0].needs)


def test_a_tower_is_counted_once_and_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_vision_model(tmp_path, "qwen2_5_vl")
    settings = [f"model.path={path}", "model.dtype=float32", "attention.num_blocks=10", *CPU]
    [needed] = [need.num_bytes for need in _host_needs(settings) if need.what == "the tower for pictures"]
    assert needed > 0
    assert "the tower for pictures" not in [need.what for need in _host_needs([*settings, "model.images=false"])]
    whole = sum(need.num_bytes for need in _host_needs(settings))
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: whole - needed)
    with pytest.raises(CapacityError, match=r"model\.images to false"):
        check_memory(load_config(None, settings))


def test_layers_that_do_not_run_and_parts_of_no_text_do_not_count(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", max_shard_size="50KB")
    whole, layer = weight_bytes(path, "float32"), 4 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3 + 2 * 64)
    assert weight_bytes(path, "float32", num_layers=1) == whole - 2 * layer
    names = {"model.vision_tower.weight": torch.zeros(64, 64), "mtp.layers.0.weight": torch.zeros(64, 64)}
    from safetensors.torch import load_file, save_file

    shard = min(path.glob("*.safetensors"))
    save_file(load_file(shard) | names, shard)
    assert weight_bytes(path, "float32") == whole


def with_memory(monkeypatch: pytest.MonkeyPatch, host: int, shared: int = GIB) -> None:
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: host)
    monkeypatch.setattr(memory_plan.shutil, "disk_usage", lambda path: type("Usage", (), {"free": shared}))


@pytest.mark.parametrize(
    ("settings", "host", "shared", "named"),
    [
        ((f"attention.kv_cache_bytes={GIB}",), GIB, GIB, "attention.kv_cache_bytes"),
        (("attention.workers=3", f"attention.kv_cache_bytes={GIB}"), 2 * GIB, GIB, "attention.kv_cache_bytes"),
        (("attention.workers=3", "attention.num_blocks=100000"), 2 * GIB, GIB, "attention.num_blocks"),
        ((f"attention.host_kv_bytes={GIB}", f"attention.kv_cache_bytes={2**20}"), GIB, GIB, "attention.host_kv_bytes"),
        ((f"attention.host_kv_bytes={2 * GIB}",), 2 * GIB, GIB, "attention.host_kv_bytes"),
        ((f"attention.host_kv_bytes={2 * GIB}",), GIB, 2 * GIB, "attention.host_kv_bytes"),
        ((), 10 * GIB, 2**20, "scheduler.max_num_batched_tokens"),
        (("launch.standby_dense=imports",), 3 * GIB // 2, GIB, "launch.standby_dense"),
    ],
)
def test_the_proposed_value_is_the_greatest_that_fits(
    settings: tuple[str, ...], host: int, shared: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, host, shared)
    with pytest.raises(CapacityError) as refused:
        check_memory(load_config(None, [*CPU, *settings]))
    free, needed, excess = map(
        int, re.findall(r"has (\d+) bytes free, (\d+) are .*, (\d+) too many", str(refused.value))[0]
    )
    assert needed - free == excess and free in (host, shared)
    value = re.search(rf"{named} to (\w+)", str(refused.value))[1]
    check_memory(load_config(None, [*CPU, *settings, f"{named}={value}"]))
    if value.isdecimal():
        with pytest.raises(CapacityError):
            check_memory(load_config(None, [*CPU, *settings, f"{named}={int(value) + 1}"]))


def test_what_processes_have_taken_that_run_already_is_free_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, CPU)
    needed = plan_memory(config)[0].num_bytes
    early = EarlyServices(["tests.support.workers.early_report"])
    try:
        deadline = time.monotonic() + 60.0
        while (taken := early.taken_bytes()) < 2**20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with_memory(monkeypatch, needed - taken)
        with pytest.raises(CapacityError):
            check_memory(config)
        check_memory(config, early.taken_bytes)
    finally:
        early.keep(set())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tensor_parallel_size=8", "tensor_parallel_size is 8, but the model has 4 heads: set it to 4 or less"),
        ("pipeline_parallel_size=64", "pipeline_parallel_size is 64, but the model has 4 layers: set it to 4 or less"),
    ],
)
def test_ranks_that_get_nothing_of_the_model_are_not_what_memory_lacks_for(
    setting: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, 2**20)
    with pytest.raises(ConfigError, match=f"^dense.{message}$"):
        check_memory(load_config(None, [*CPU, f"dense.{setting}"]))


def test_each_attention_worker_has_its_own_cache_and_region() -> None:
    one, three = (
        {
            place.name: {need.what: need.num_bytes for need in place.needs}
            for place in plan_memory(load_config(None, [*CPU, each]))
        }
        for each in ("attention.workers=1", "attention.workers=3")
    )
    for name, what in (("host memory", "the KV cache"), (f"shared memory {SHM_DIR}", "what the workers exchange")):
        assert three[name][f"{what} of 3 workers"] == 3 * one[name][what] > 0
    assert "3 processes" in one["host memory"] and "5 processes" in three["host memory"]


def test_smaller_weights_are_proposed_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [*CPU, f"attention.kv_cache_bytes={2**20}"])
    host, _ = plan_memory(config)
    saved = weight_bytes(EMBEDDED_MODEL, "float32") // 2
    with_memory(monkeypatch, host.num_bytes - saved)
    with pytest.raises(CapacityError, match=f"{saved} too many: set model.dtype to bfloat16"):
        check_memory(config)
    with_memory(monkeypatch, host.num_bytes - saved - 1)
    with pytest.raises(CapacityError, match=f"or {saved + 1} bytes more memory, is needed"):
        check_memory(config)


def with_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(memory_plan, "is_on_gpu", lambda device: True)
    monkeypatch.setattr(memory_plan, "list_gpus", lambda: [Gpu("GPU-1", "NVIDIA H100", free_bytes)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


LAZY = ("dense.captures_lazily=true", "attention.captures_lazily=true")


@pytest.mark.parametrize("spare_bytes", [0, -1])
def test_on_a_gpu_the_weights_buffers_and_contexts_must_fit(spare_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["model.dtype=bfloat16", "scheduler.max_num_batched_tokens=64", *LAZY])
    # logits in bfloat16 and in float32, and for each token a hidden state and the two activations of a gated MLP
    buffers = (2 + 4) * 64 * 1024 + 2 * 64 * (256 + 2 * 704)
    need = weight_bytes(EMBEDDED_MODEL, "bfloat16") + buffers + 2 * memory_plan.CONTEXT_BYTES
    with_gpu(monkeypatch, need + spare_bytes)
    if not spare_bytes:
        check_memory(config)
        return
    with pytest.raises(CapacityError, match=r"NVIDIA H100, GPU-1, has .* 1 too many: set dense.quantization to fp8"):
        check_memory(config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("attention.kv_cache_memory_fraction=1",), "attention.kv_cache_memory_fraction"),
        (("dense.max_loras=64", "dense.max_lora_rank=256", *LAZY), "dense.max_loras"),
        (("launch.standby_dense=loaded", *LAZY), "launch.standby_dense"),
        (("launch.standby_attention=imports", "attention.kv_cache_memory_fraction=0.95"), "launch.standby_attention"),
    ],
)
def test_what_a_gpu_has_no_room_for_is_named_with_a_setting_that_fits(
    settings: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, 700 * 2**20)
    whole = [*settings, "model.dtype=bfloat16"]
    with pytest.raises(CapacityError, match="NVIDIA H100") as refused:
        check_memory(load_config(None, whole))
    value = re.search(rf"{named} to ([\w.]+)", str(refused.value))[1]
    check_memory(load_config(None, [*whole, f"{named}={value}"]))


PARTS = "the (weights|draft model|KV cache of drafts|buffers)"
RANKS = ("model.dtype=bfloat16", "scheduler.max_num_batched_tokens=64", "dense.tensor_parallel_size=2", *LAZY)


def with_two_gpus(monkeypatch: pytest.MonkeyPatch, *free_bytes: int) -> None:
    with_gpu(monkeypatch, 0)
    gpus = [Gpu(f"GPU-{number}", "NVIDIA H100", each) for number, each in enumerate(free_bytes, 1)]
    monkeypatch.setattr(memory_plan, "list_gpus", lambda: gpus)


def test_each_rank_has_its_part_and_the_first_one_the_draft_model_and_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_two_gpus(monkeypatch, GIB, GIB)
    drafts = ("scheduler.speculation=draft_model", f"scheduler.draft_model={EMBEDDED_MODEL}")
    first, second = plan_memory(load_config(None, [*RANKS, *drafts]))[-2:]
    assert "GPU-1" in first.name and "GPU-2" in second.name
    whole = weight_bytes(EMBEDDED_MODEL, "bfloat16")
    buffers = 2 * 64 * (256 + 2 * 704 // 2)
    of_first, of_second = [
        {re.match(PARTS, need.what)[0]: need.num_bytes for need in place.needs[:count]}
        for place, count in ((first, 4), (second, 2))
    ]
    logits = (2 + 4) * 64 * 1024
    cache = (1 + 64 * 2048 // 64) * 64 * 4 * 2 * 128 * 2  # for 64 sequences of 2,048 tokens, and one block more
    assert of_first == {
        "the weights": whole // 2,
        "the draft model": whole,
        "the KV cache of drafts": cache,
        "the buffers": buffers + logits,
    }
    assert of_second == {"the weights": whole // 2, "the buffers": buffers}


@pytest.mark.parametrize("more", [0, 1])
def test_the_gpu_of_each_rank_is_checked_against_its_part_of_what_a_setting_saves(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = weight_bytes(EMBEDDED_MODEL, "bfloat16") // 2 + 2 * 64 * (256 + 704) + 2 * memory_plan.CONTEXT_BYTES
    saved = (weight_bytes(EMBEDDED_MODEL, "bfloat16") - weight_bytes(EMBEDDED_MODEL, "bfloat16", to_fp8=True)) // 2
    with_two_gpus(monkeypatch, GIB, need - saved - more)
    mend = "a smaller or a quantized model" if more else "set dense.quantization to fp8$"
    with pytest.raises(CapacityError, match=f"NVIDIA H100, GPU-2, has .* {saved + more} too many: {mend}"):
        check_memory(load_config(None, RANKS))


def test_each_gpu_of_several_attention_workers_is_checked_for_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_two_gpus(monkeypatch, GIB, GIB)
    devices = ("attention.workers=3", 'attention.devices=["cuda:0", "cuda:1"]', "attention.num_blocks=10")
    first, second = plan_memory(load_config(None, ["model.dtype=bfloat16", *devices, *LAZY]))[-2:]
    names = ("contexts", "10 blocks of the KV cache of 2 workers", "10 blocks of the KV cache")
    of_first, of_second = [
        {need.what: need.num_bytes for need in place.needs if need.what in names} for place in (first, second)
    ]
    block_bytes = 16 * 2 * 2 * 4 * 2 * 64  # tokens, bytes, keys and values, layers, heads, sizes
    context = memory_plan.CONTEXT_BYTES
    assert of_first == {"contexts": 3 * context, "10 blocks of the KV cache of 2 workers": 20 * block_bytes}
    assert of_second == {"contexts": context, "10 blocks of the KV cache": 10 * block_bytes}


def test_slots_for_adapters_have_two_matrices_of_each_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [
        each
        for name, each in load_true_model(EMBEDDED_MODEL).named_modules()
        if isinstance(each, torch.nn.Linear) and "layers" in name
    ]
    with_gpu(monkeypatch, 2 * GIB)
    config = load_config(None, ["model.dtype=bfloat16", "dense.max_loras=3", "dense.max_lora_rank=17"])
    [need] = [need for need in plan_memory(config)[-1].needs if "adapters" in need.what]
    assert linears and need.num_bytes == sum(3 * 32 * (each.in_features + each.out_features) * 2 for each in linears)


def test_ranks_have_parts_of_the_slots_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 2 * GIB)
    monkeypatch.setattr(memory_plan, "list_gpus", lambda: [Gpu(f"GPU-{i}", "NVIDIA H100", 2 * GIB) for i in range(2)])
    lora = ["model.dtype=bfloat16", "dense.max_loras=3", "dense.max_lora_rank=17"]
    whole = load_model_config(EMBEDDED_MODEL)
    for ranks in ([], ["dense.tensor_parallel_size=2"], ["dense.pipeline_parallel_size=2"]):
        config = load_config(None, [*lora, *ranks])
        found = needs_of(config, "adapters")
        assert len(found) == config.dense.num_ranks
        for index, need in enumerate(found):
            rank = Rank.of(config.dense, index)
            layers = empty_weights(whole, torch.bfloat16, torch.device("meta"), rank=rank).layers
            linears = list(parts_of_type(Linear, layers))
            sizes = [each.out_features + len(each.merged_from) * each.in_features for each in linears]
            assert need.num_bytes == sum(3 * 32 * size * 2 for size in sizes), rank


def needs_of(config: Config, text: str) -> list[Need]:
    return [need for place in plan_memory(config) for need in place.needs if text in need.what]


@pytest.mark.parametrize("kind", ["model", "int8", "fp8"])
@pytest.mark.parametrize("variant", ["mistral", "mixtral", "gpt_oss", "gemma2", "deepseek_v3", "qwen3_next"])
def test_blocks_whose_number_is_set_are_those_of_the_attention_worker(variant: str, kind: str, tmp_path: Path) -> None:
    path = make_family_model(tmp_path, variant)
    if kind != "model" and variant in ("deepseek_v3", "qwen3_next"):
        return  # have no cache of 8 bits
    settings = ("attention.num_blocks=640", f"attention.kv_cache_dtype={kind}", "attention.block_size=8")
    config = load_config(None, [f"model.path={path}", *CPU, *settings])
    model = resolve_model(config.model, "cpu", config.attention)
    spec = make_cache_spec(config.attention, model, StepLimits(config.scheduler.max_num_seqs, 64))
    [need] = needs_of(config, "640 blocks")
    # Without states, and without the window's blocks of layers that have fewer.
    exact = 640 * 8 * spec.group_token_bytes(0)
    assert need.num_bytes in (exact, 0), "what is counted is exact"
    assert need.num_bytes or variant in ("gemma2",), "and most is counted"


def test_blocks_of_the_embedded_model_are_counted_and_fewer_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [*CPU, "attention.num_blocks=20000"])
    spec = make_cache_spec(config.attention, resolve_model(config.model, "cpu", config.attention))
    [need] = needs_of(config, "20000 blocks")
    assert need.num_bytes == spec.num_bytes
    with_memory(monkeypatch, plan_memory(config)[0].num_bytes - spec.block_bytes // 2)
    with pytest.raises(CapacityError, match=r"set attention\.num_blocks to 19999 or less"):
        check_memory(config)


def test_heads_that_draft_and_their_cache_are_counted(tmp_path: Path) -> None:
    head = random_head(256, 1024, layers=(1, 2, 3), draft_vocab_size=100, has_embedding=True)
    path = write_head(tmp_path / "head", in_layout_of_vllm(head), config_of(head, 1024))
    settings = ("scheduler.speculation=eagle3", f"scheduler.speculation_model={path}", "scheduler.max_num_seqs=2")
    config = load_config(None, [*CPU, *settings])
    [weights], [cache] = needs_of(config, "the heads head"), needs_of(config, "cache of drafts")
    floats = sum(each.numel() for each in head.tensors.values() if each.is_floating_point())
    assert weights.num_bytes == 4 * floats
    model = resolve_model(config.model, "cpu", config.attention)
    stored = find_eagle_head(config.scheduler, model)
    eagle = make_eagle_model(stored.load(), torch.empty(1024, 256), config.scheduler, model)
    assert cache.num_bytes == eagle.num_blocks * 64 * 2 * 2 * 16 * 4, "keys and values of 64 tokens and 2 heads of 16"


@pytest.mark.parametrize("has_embedding", [True, False])
def test_the_first_rank_has_the_whole_embedding_for_heads_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_embedding: bool
) -> None:
    with_two_gpus(monkeypatch, GIB, GIB)
    head = random_head(256, 1024, layers=(1, 2, 3), draft_vocab_size=100, has_embedding=has_embedding)
    path = write_head(tmp_path / "head", in_layout_of_vllm(head), config_of(head, 1024))
    config = load_config(None, [*RANKS, "scheduler.speculation=eagle3", f"scheduler.speculation_model={path}"])
    first, second = plan_memory(config)[-2:]
    [need] = [each for each in (*first.needs, *second.needs) if each.what == "the heads head"]
    floats = sum(each.numel() for each in head.tensors.values() if each.is_floating_point())
    table = whole_embedding(config.model, load_model_config(EMBEDDED_MODEL), torch.bfloat16, torch.device("cpu"))
    assert need in first.needs and need.num_bytes == 2 * floats + (0 if has_embedding else table.nbytes)


def test_only_the_heads_that_run_are_counted(tmp_path: Path) -> None:
    heads = medusa_heads.random_heads(4, 256, 1024)
    for layout in (medusa_heads.in_layout_of_medusa, medusa_heads.in_layout_of_vllm):
        path = medusa_heads.write_heads(
            tmp_path / layout.__name__, layout(heads), medusa_num_heads=4, medusa_num_layers=1
        )
        settings = (f"scheduler.speculation_model={path}", "scheduler.num_speculative_tokens=3")
        config = load_config(None, [*CPU, "scheduler.speculation=medusa", *settings])
        [need] = needs_of(config, f"the heads {path.name}")
        assert need.num_bytes == 3 * 4 * (256 * 256 + 256 + 1024 * 256)


def test_a_host_tier_in_a_file_must_fit_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 10 * GIB, GIB)
    settings = [*CPU, f"attention.host_kv_bytes={2 * GIB}", f"attention.host_kv_path={tmp_path}/tier"]
    with pytest.raises(CapacityError, match=f"the disk of {tmp_path} has .* set attention.host_kv_bytes to {GIB}"):
        check_memory(load_config(None, settings))
    check_memory(load_config(None, [*settings, f"attention.host_kv_bytes={GIB}"]))
    ranks = [*settings, f"attention.host_kv_bytes={GIB}", "dense.tensor_parallel_size=2"]
    with pytest.raises(CapacityError, match=f"the disk of {tmp_path} has .* set attention.host_kv_bytes to {GIB // 2}"):
        check_memory(load_config(None, ranks))


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama")
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] if damage == "cut" else data[:8] + b"[" + data[9:])
    with pytest.raises(ModelError, match=f"{file} is missing, truncated or damaged"):
        weight_bytes(path, "float32")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *(("shape", value, "has the shape") for value in (["a", 2], "ab", None, [{}], 5, [-1, 10], [True, 2])),
        ("dtype", ["F32"], r"has the dtype \['F32'\]"),
        ("data_offsets", [0.5, 8], r"is from byte 0\.5 to 8"),
        ("data_offsets", [8, 4], "is from byte 8 to 4"),
    ],
)
def test_a_header_of_other_values_is_called_damaged(key: str, value: object, said: str, tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama")
    file = path / "model.safetensors"
    size = int.from_bytes((data := file.read_bytes())[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if "q_proj" in name)
    header[name][key] = value
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
    with pytest.raises(ModelError, match=f"{file} is missing, truncated or damaged: {name} {said}"):
        weight_bytes(path, "float32")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_weights_without_permission_are_named(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path, "llama")
    (model / "model.safetensors").chmod(0)
    as_owner = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    code = "import sys; from pathlib import Path; from services.launch.checkpoint_bytes import *\n"
    code += "try: weight_bytes(Path(sys.argv[1]), 'float32')\nexcept ModelError as error: print(error)"
    done = subprocess.run(
        [*as_owner, sys.executable, "-c", code, str(model)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60.0, check=True,
    )  # fmt: skip
    assert f"{model}/model.safetensors" in done.stdout and "Permission denied" in done.stdout


def test_a_start_that_does_not_fit_ends_with_one_sentence_before_any_child() -> None:
    left_by_a_killed_server = SHM_DIR / f"{NAME_PREFIX}{0:016x}-{os.getpid()}-0"
    left_by_a_killed_server.touch()
    flags = [f"--set={each}" for each in (*CPU, f"attention.kv_cache_bytes={2**60}")]
    done = run_warm("services.launch", "--prompt", "x", *flags)
    assert done.returncode == 1
    assert not left_by_a_killed_server.exists(), "its memory would count as taken"
    assert done.stderr.count("\n") == 1 and "set attention.kv_cache_bytes to" in done.stderr, done.stderr
