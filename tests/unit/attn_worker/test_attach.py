"""Attaching: a dense worker that dies meanwhile leaves nothing behind, and the limits of memory hold."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.attn_worker import build as build_module
from services.attn_worker import servicer as servicer_module
from services.attn_worker.attach_request import read_recurrences, read_relative_bias, read_sinks
from services.attn_worker.build import AttentionSetup, build_engine
from services.attn_worker.cache.make_spec import StepLimits
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.servicer import AttentionServicer
from services.channel import Channel
from services.channel.region import NAME_PREFIX, SHM_DIR
from services.common.config import AttentionSection, ModelSection
from services.common.errors import CapacityError, ConfigError, DeviceError, InvalidRequest, PeerError
from services.common.families.shape import GatedDelta, RelativeBias
from services.common.model_config import AttentionOptions, ModelConfig
from services.common.resolve import resolve_model
from services.pb import attn_pb2, stall_pb2
from services.rpc.spans import NoTracer

MAX_PLAN_BYTES = 1 << 20
EPOCH = 0x5EA1_ED5E_0000_0001
TIMEOUT_S = 60.0
MODEL = resolve_model(ModelSection(), "cpu")
NUM_SINKS = MODEL.config.num_layers * MODEL.config.num_heads
BIAS = RelativeBias(num_buckets=8, max_distance=20)
NUM_BIASES = BIAS.num_buckets * MODEL.config.num_heads


class FakeContext:
    def peer(self) -> str:
        return "test"


async def on_stall(stall: stall_pb2.Stall | None) -> None:
    raise AssertionError(stall)


def make_servicer(kv_cache_dtype: str = "auto") -> AttentionServicer:
    section = AttentionSection(num_blocks=8, kv_cache_dtype=kv_cache_dtype)
    arguments = AttentionSetup(section, MODEL), EPOCH, TIMEOUT_S, CollectorRegistry(), NoTracer(), TIMEOUT_S, on_stall
    return AttentionServicer(*arguments, max_message_bytes=MAX_PLAN_BYTES)


def make_request(**changes: object) -> attn_pb2.AttachRequest:
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_dtype": "model"} | changes
    return attn_pb2.AttachRequest(
        dtype="float32", model_fingerprint=MODEL.config.fingerprint, weights_hash="00", **fields
    )


def num_regions() -> int:
    return len(list(SHM_DIR.glob(f"{NAME_PREFIX}{EPOCH:016x}-*")))


def test_a_dense_worker_that_dies_while_attaching_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, num_builds = threading.Event(), 0

    def build_slowly(*arguments: object) -> AttentionEngine:
        nonlocal num_builds
        num_builds += 1
        assert may_end.wait(TIMEOUT_S)
        return build_engine(*arguments)

    monkeypatch.setattr(servicer_module, "build_engine", build_slowly)
    request = make_request()

    async def attach_twice() -> None:
        servicer = make_servicer()
        killed = asyncio.create_task(servicer.Attach(request, FakeContext()))
        while not num_builds:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        assert num_regions() == 0
        may_end.set()
        async with asyncio.timeout(TIMEOUT_S):
            reply = await servicer.Attach(request, FakeContext())
            assert (reply.attachment_id, num_builds, num_regions()) == (2, 1, 1)
            # Cancelled at different points: before the old region is closed, or before the new one is handed over.
            for num_turns in range(10):
                killed = asyncio.create_task(servicer.Attach(request, FakeContext()))
                for _ in range(num_turns):
                    await asyncio.sleep(0.001)
                killed.cancel()
                await asyncio.gather(killed, return_exceptions=True)
            assert (await servicer.Attach(request, FakeContext())).attachment_id > 2
        assert (num_builds, num_regions()) == (1, 1)
        servicer.abort()
        servicer.stop()

    asyncio.run(attach_twice())
    assert num_regions() == 0


def test_a_dense_worker_that_dies_while_kernels_are_loaded_binds_no_later_one() -> None:
    async def attach() -> None:
        section = AttentionSection(num_blocks=8)
        setup = AttentionSetup(section, MODEL)
        arguments = setup, EPOCH, TIMEOUT_S, CollectorRegistry(), NoTracer(), TIMEOUT_S, on_stall
        loading = asyncio.get_running_loop().create_future()
        servicer = AttentionServicer(
            *arguments, loading=asyncio.create_task(_until(loading)), max_message_bytes=MAX_PLAN_BYTES
        )
        first = asyncio.create_task(servicer.Attach(make_request(), FakeContext()))
        await asyncio.wait_for(servicer.is_used.wait(), TIMEOUT_S)
        for _ in range(10):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        loading.set_result(None)
        try:
            assert (await servicer.Attach(make_request(max_num_seqs=8), FakeContext())).num_blocks == 8
        finally:
            servicer.abort()
            await asyncio.to_thread(servicer.stop)

    asyncio.run(attach())


async def _until(future: asyncio.Future[None]) -> None:
    await future


def test_a_stopping_worker_refuses_to_attach() -> None:
    """Otherwise the dense worker would attach, fail, and attach again within milliseconds."""

    async def attach_late() -> None:
        servicer = make_servicer()
        await servicer.leave(TIMEOUT_S)
        with pytest.raises(PeerError, match="stopping"):
            await servicer.Attach(attn_pb2.AttachRequest(), FakeContext())
        assert num_regions() == 0

    asyncio.run(attach_late())


class SharedMemory:
    """Shared memory with room for `room` regions. A region takes room until all its users have closed it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._create = servicer_module.create_channel
        monkeypatch.setattr(servicer_module, "create_channel", self._create_if_there_is_room)

    def _create_if_there_is_room(self, *arguments: object, **keywords: object) -> Channel:
        if num_regions() >= self.room:
            raise CapacityError(f"data region needs 5 bytes of shared memory, {SHM_DIR} has 4 free")
        return self._create(*arguments, **keywords)


def test_an_attachment_frees_the_region_of_the_previous_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    SharedMemory(monkeypatch, room=1)

    async def attach() -> None:
        servicer = make_servicer()
        for attachment_id in (1, 2):
            assert (await servicer.Attach(make_request(), FakeContext())).attachment_id == attachment_id
        replies = await asyncio.gather(*(servicer.Attach(make_request(), FakeContext()) for _ in range(3)))
        assert [reply.attachment_id for reply in replies] == [3, 4, 5]
        servicer.abort()
        servicer.stop()

    asyncio.run(asyncio.wait_for(attach(), TIMEOUT_S))
    assert num_regions() == 0


def test_an_attachment_waits_until_a_dense_worker_frees_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(monkeypatch, room=0)

    async def attach() -> None:
        servicer = make_servicer()
        with capture_logs() as events:
            attaching = asyncio.create_task(servicer.Attach(make_request(), FakeContext()))
            while not (reasons := [event["reason"] for event in events if "reason" in event]):  # noqa: ASYNC110  bounded
                await asyncio.sleep(0.01)
        assert "needs 5 bytes" in reasons[0] and "4 free" in reasons[0]
        memory.room = 1
        assert (await attaching).attachment_id == 1
        servicer.abort()
        servicer.stop()

    asyncio.run(asyncio.wait_for(attach(), TIMEOUT_S))


def test_an_attachment_waits_for_room_up_to_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(monkeypatch, room=0)
    monkeypatch.setattr(servicer_module, "_ROOM_TIMEOUT_S", 0.3)

    async def attach() -> None:
        servicer = make_servicer()
        with pytest.raises(CapacityError, match=r"needs 5 bytes of shared memory, .* has 4 free"):
            await servicer.Attach(make_request(), FakeContext())
        memory.room = 1
        assert (await servicer.Attach(make_request(), FakeContext())).attachment_id == 2
        servicer.abort()
        servicer.stop()

    asyncio.run(asyncio.wait_for(attach(), TIMEOUT_S))


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (DeviceError("a CUDA call failed: CUDA_ERROR_ILLEGAL_ADDRESS"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),  # the error of torch
        (CapacityError("no room for the KV cache"), False),
    ],
)
def test_a_failed_gpu_ends_the_worker_and_the_dense_worker_waits_for_its_successor(
    error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> AttentionEngine:
        raise error

    monkeypatch.setattr(servicer_module, "build_engine", fail)

    async def attach() -> None:
        servicer = make_servicer()
        failure = asyncio.create_task(servicer.wait_failure())
        for message in (str(error), "stopping" if ends else str(error)):
            with pytest.raises(PeerError if ends else type(error), match=message):
                await servicer.Attach(make_request(), FakeContext())
        await asyncio.sleep(0.01)  # for the task to notice
        assert failure.done() is ends
        if ends:
            assert failure.exception() is error
        failure.cancel()

    asyncio.run(attach())


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_later_dense_worker_may_not_plan_larger_steps_than_the_first(limit: str) -> None:
    async def attach() -> None:
        servicer = make_servicer()
        await servicer.Attach(make_request(), FakeContext())
        with pytest.raises(ConfigError, match=rf"{limit} is 17, this attention worker was started for (4|16) "):
            await servicer.Attach(make_request(**{limit: 17}), FakeContext())
        assert (await servicer.Attach(make_request(**{limit: 3}), FakeContext())).attachment_id == 2
        servicer.abort()
        servicer.stop()

    asyncio.run(attach())


@pytest.mark.parametrize(("num_blocks", "is_bound"), [(127, True), (128, False)])
def test_a_cache_too_small_for_the_longest_sequence_logs_a_warning(num_blocks: int, is_bound: bool) -> None:
    assert MODEL.max_model_len == 128 * 16
    section = AttentionSection(num_blocks=num_blocks, block_size=16)
    metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
    with capture_logs() as events:
        engine = build_engine(AttentionSetup(section, MODEL), StepLimits(4, 16), metrics)
    engine.stop(TIMEOUT_S)
    warnings = [event for event in events if event["log_level"] == "warning"]
    assert [event["num_tokens"] for event in warnings] == ([num_blocks * 16] if is_bound else [])


def test_a_start_without_memory_for_copies_leaves_the_host_tiers_file_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    section = AttentionSection(num_blocks=8, host_kv_bytes=2**20, host_kv_path=tmp_path / "kv")
    metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
    arguments = AttentionSetup(section, MODEL), StepLimits(4, 16), metrics

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB. 8.00 MiB is free. Advice.")

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "CpuBlockCopier", fail)
        with pytest.raises(CapacityError, match=r"no room for the copies of the host tier: .* 32\.00 MiB"):
            build_engine(*arguments)
    build_engine(*arguments).stop(TIMEOUT_S)


@pytest.mark.parametrize(("own", "other"), [("auto", "fp8"), ("int8", "fp8"), ("fp8", "model"), ("fp8", "")])
def test_workers_that_disagree_on_the_format_of_the_kv_cache_do_not_attach(own: str, other: str) -> None:
    async def attach() -> None:
        servicer = make_servicer(own)
        found = {"auto": "model"}.get(own, own)
        with pytest.raises(ConfigError, match=f"kv_cache_dtype is {other}, the attention worker's is {found}"):
            await servicer.Attach(make_request(kv_cache_dtype=other), FakeContext())

    asyncio.run(attach())


@pytest.mark.parametrize(
    ("key_scales", "value_scales", "words"),
    [
        ([1, 1, math.nan, 1], [1] * 4, "key_scales of layer 2 is nan"),
        ([1] * 4, [1, -2, 1, 1], "value_scales of layer 1 is -2.0"),
        ([0] * 4, [1] * 4, "key_scales of layer 0 is 0.0"),
        ([math.inf] * 4, [1] * 4, "key_scales of layer 0 is inf"),
        ([1] * 3, [1] * 4, "has 3 key_scales, the model has 4 layers"),
        ([1] * 4, [], "has 0 value_scales, the model has 4 layers"),
    ],
)
def test_wrong_scales_are_refused_with_their_layer_and_value(
    key_scales: list[float], value_scales: list[float], words: str
) -> None:
    request = make_request(kv_cache_dtype="fp8", key_scales=key_scales, value_scales=value_scales)

    async def attach() -> None:
        with pytest.raises(InvalidRequest, match=words):
            await make_servicer("fp8").Attach(request, FakeContext())

    asyncio.run(attach())


@pytest.mark.parametrize(
    ("has_sinks", "sinks", "words"),
    [
        (False, [0.5], "has 1 sinks, the model calls for 0"),
        (True, [], f"has 0 sinks, the model calls for {NUM_SINKS}"),
        (True, [0.5] * (NUM_SINKS + 1), f"has {NUM_SINKS + 1} sinks, the model calls for {NUM_SINKS}"),
        (True, [0.5] * (NUM_SINKS - 1) + [math.nan], "sink of layer 3 and head [0-9]+ is nan, expected"),
        (True, [-math.inf] * NUM_SINKS, "sink of layer 0 and head 0 is -inf"),
    ],
)
def test_wrong_sinks_are_refused(has_sinks: bool, sinks: list[float], words: str) -> None:
    config = dataclasses.replace(MODEL.config, attention=AttentionOptions(has_sinks=has_sinks))
    with pytest.raises(InvalidRequest, match=words):
        read_sinks(make_request(sinks=sinks), config)


@pytest.mark.parametrize(
    ("has_bias", "values", "words"),
    [
        (False, [0.5], "has 1 relative biases, the model calls for 0"),
        (True, [], f"has 0 relative biases, the model calls for {NUM_BIASES}"),
        (True, [0.5] * (NUM_BIASES + 1), f"has {NUM_BIASES + 1} relative biases, the model calls for {NUM_BIASES}"),
        (
            True,
            [0.5] * (NUM_BIASES - 1) + [math.nan],
            f"bucket {BIAS.num_buckets - 1} and head {MODEL.config.num_heads - 1} is nan, expected a finite number",
        ),
        (True, [math.inf] * NUM_BIASES, "relative bias of bucket 0 and head 0 is inf"),
    ],
)
def test_wrong_relative_biases_are_refused(has_bias: bool, values: list[float], words: str) -> None:
    attention = AttentionOptions(relative_bias=BIAS if has_bias else None)
    config = dataclasses.replace(MODEL.config, attention=attention)
    with pytest.raises(InvalidRequest, match=words):
        read_relative_bias(make_request(relative_bias=values), config)


def test_relative_biases_are_read_by_bucket() -> None:
    config = dataclasses.replace(MODEL.config, attention=AttentionOptions(relative_bias=BIAS))
    rows = read_relative_bias(make_request(relative_bias=range(NUM_BIASES)), config)
    assert [len(row) for row in rows] == [config.num_heads] * BIAS.num_buckets
    assert [value for row in rows for value in row] == list(range(NUM_BIASES))


def test_sinks_are_read_by_layer() -> None:
    config = dataclasses.replace(MODEL.config, attention=AttentionOptions(has_sinks=True))
    rows = read_sinks(make_request(sinks=range(NUM_SINKS)), config)
    assert [len(row) for row in rows] == [config.num_heads] * config.num_layers
    assert [sink for row in rows for sink in row] == list(range(NUM_SINKS))


GATED = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_size=2)  # 32 channels


def gated_config() -> ModelConfig:
    """A model of four layers, of which layers 1 and 3 have a recurrence."""
    heads = MODEL.config.heads
    layers = tuple(dataclasses.replace(heads, recurrence=GATED if layer % 2 else None) for layer in range(4))
    return dataclasses.replace(MODEL.config, attention=AttentionOptions(layer_heads=layers))


def gated_weights(layer: int, **changes: object) -> attn_pb2.RecurrenceWeights:
    conv = np.arange(64, dtype="<f4").tobytes()
    fields = {"conv": conv, "a_log": [0.5, -1.0, 2.0, 0.0], "dt_bias": [1.0] * 4} | changes
    return attn_pb2.RecurrenceWeights(layer=layer, **fields)


def test_weights_of_recurrences_are_read_by_layer() -> None:
    request = make_request(recurrences=[gated_weights(1), gated_weights(3, dt_bias=[0.25] * 4)])
    found = read_recurrences(request, gated_config())
    assert list(found) == [1, 3]
    assert np.frombuffer(found[1].conv, "<f4").tolist() == list(range(64))
    assert found[3].a_log == (0.5, -1.0, 2.0, 0.0) and found[3].dt_bias == (0.25,) * 4
    assert read_recurrences(make_request(), MODEL.config) == {}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], r"weights of layers \[\], the model calls for \[1, 3\]"),
        ([gated_weights(3), gated_weights(1)], r"of layers \[3, 1\], the model calls for \[1, 3\]"),
        ([gated_weights(1), gated_weights(3, conv=bytes(252))], "has 63 weights conv of layer 3, .* for 64"),
        ([gated_weights(1), gated_weights(3, conv=bytes(258))], "has 64 weights and 2 bytes conv of layer 3"),
        ([gated_weights(1, a_log=[0.0] * 3), gated_weights(3)], "has 3 weights a_log of layer 1, .* for 4"),
        ([gated_weights(1), gated_weights(3, dt_bias=[])], "has 0 weights dt_bias of layer 3, .* for 4"),
        ([gated_weights(1, a_log=[0, 0, math.inf, 0]), gated_weights(3)], "a_log of layer 1 has inf"),
        ([gated_weights(1), gated_weights(3, dt_bias=[0, math.nan, 0, 0])], "dt_bias of layer 3 has nan"),
        ([gated_weights(1, conv=np.full(64, -np.inf, "<f4").tobytes()), gated_weights(3)], "conv of layer 1 has -inf"),
    ],
)
def test_wrong_weights_of_recurrences_are_refused(weights: list[attn_pb2.RecurrenceWeights], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_recurrences(make_request(recurrences=weights), gated_config())


def test_models_without_recurrences_refuse_their_weights() -> None:
    with pytest.raises(InvalidRequest, match=r"of layers \[0\], the model calls for \[\]"):
        read_recurrences(make_request(recurrences=[gated_weights(0)]), MODEL.config)
