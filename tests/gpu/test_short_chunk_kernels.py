"""Short chunks behind contexts that are split give the results of the float32 torch reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.step_metadata import build_step_metadata
from services.attn_worker.layers import DECODE_ONLY, StepShape
from services.common.kv_cache.scales import KVScales
from services.common.model_config import AttentionOptions, ModelConfig, RopeConfig
from tests.gpu.attention_pair import MAX_MODEL_LEN, TOLERANCES, Kernels, Pair, make_config, relative_error

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
HEAD_DIM = 16
PLAIN = RopeConfig("default", 10000.0, HEAD_DIM, MAX_MODEL_LEN)
SLOPES = (0.5, 0.25, 0.125, 0.0625)
SCALES = KVScales((0.03, 0.5), (0.011, 2.0))
OPTIONS = {
    "plain": AttentionOptions(),
    "softcap": AttentionOptions(scale=0.4, softcap=3.0),
    "ALiBi": AttentionOptions(alibi_slopes=SLOPES, layer_ropes=(None, None)),
    "learned sinks": AttentionOptions(has_sinks=True),
    "pairs of a part": AttentionOptions(rotates_pairs=True, layer_ropes=(replace(PLAIN, rotary_dim=8),) * 2),
}
# Drafts beside a sequence that has none; a turn of a chat; both again, when the counters of pieces must be zero.
STEPS = ({"a": 3, "b": 2, "c": 1}, {"a": 20, "b": 64, "c": 1}, {"a": 17, "b": 1, "c": 2})


@pytest.fixture
def kernels_as_they_are(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


@pytest.fixture
def kernels(kernels_as_they_are: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Split every context, and into more pieces, also where that does not pay."""
    from services.attn_worker.layers import triton_attention  # needs triton

    monkeypatch.setattr(triton_attention, "shortest_split_context", lambda group: 1)
    monkeypatch.setattr(triton_attention, "_KEYS_OF_PIECE", 1)
    return kernels_as_they_are


def config_of(options: AttentionOptions, num_kv_heads: int = 2) -> ModelConfig:
    rope = options.layer_ropes[0] if options.layer_ropes and options.layer_ropes[0] else PLAIN
    return replace(make_config(4, num_kv_heads, HEAD_DIM, (None, 40), rope), attention=options)


def short_shapes(pair: Pair) -> list[StepShape]:
    return [each for each in pair.kernels.captured_shapes if each != DECODE_ONLY and not each.has_prompts]


def chunk_of(pair: Pair, num_tokens: dict[str, int]) -> int | None:
    """The longest chunk that the step's graph of short chunks takes; None: it is no such step."""
    shape = pair.kernels.captured_shape(pair.plan(num_tokens))
    return None if shape is None or shape.has_prompts else shape.chunk


def check_steps(pair: Pair, tolerance: float) -> None:
    pair.run(pair.plan({"a": 150, "b": 70, "c": 4}))
    for num_tokens in STEPS:
        for out, expected in pair.run(pair.plan(num_tokens)):
            assert relative_error(out, expected) < tolerance


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(kernels: Kernels, options: str) -> None:
    check_steps(Pair(config_of(OPTIONS[options]), kernels), kernels.tolerance)


@pytest.mark.parametrize(("num_kv_heads", "block_size"), [(1, 12), (4, 32)])
def test_heads_and_block_sizes(kernels: Kernels, num_kv_heads: int, block_size: int) -> None:
    config = config_of(AttentionOptions(), num_kv_heads)
    check_steps(Pair(config, kernels, block_size=block_size), kernels.tolerance)


def test_chunks_that_are_split_beside_some_that_are_not(
    kernels_as_they_are: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.attn_worker.layers import triton_attention  # needs triton

    monkeypatch.setattr(triton_attention, "shortest_split_context", lambda group: 160)
    pair = Pair(config_of(AttentionOptions()), kernels_as_they_are)
    pair.run(pair.plan({"a": 150, "b": 70, "c": 4, "d": 30}))
    for out, expected in pair.run(pair.plan({"a": 20, "b": 30, "c": 1, "d": 3})):
        assert relative_error(out, expected) < kernels_as_they_are.tolerance


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [(torch.int8, 1e-3), (torch.float8_e4m3fn, 1e-3)], ids=str)
def test_caches_of_8_bits(kernels: Kernels, cache_dtype: torch.dtype, tolerance: float) -> None:
    if kernels.device.type == "cpu" and cache_dtype == torch.float8_e4m3fn:
        tolerance = 0.2  # Triton's interpreter cuts e4m3 off where a GPU and the reference round: 2^-3 of a number
    config = config_of(AttentionOptions(has_sinks=True))
    check_steps(Pair(config, kernels, cache_dtype=cache_dtype, scales=SCALES), tolerance)


def test_a_graph_of_short_chunks_has_room_for_any_of_its_steps(kernels: Kernels) -> None:
    """Its inputs are padded; rows beyond those of the step are not written."""
    pair = Pair(config_of(AttentionOptions()), kernels)
    pair.run(pair.plan({"a": 150, "b": 3}))
    sizes = []
    for num_tokens in ({"a": 3, "b": 2, "c": 1}, {"c": 30, "a": 1}):
        step = pair.plan(num_tokens)
        shape = pair.kernels.captured_shape(step)
        assert shape is not None and not shape.has_prompts
        sizes.append(shape)
        for out, expected in pair.run(step, padded_num_rows=40, shape=shape):
            num_rows = len(step.positions)
            assert relative_error(out[:num_rows], expected) < kernels.tolerance
            assert out[num_rows:].isnan().all()
    assert sizes == short_shapes(pair)
    assert chunk_of(pair, {"d": 65}) is None
    assert chunk_of(pair, {"e": 40, "f": 25}) is None


def check_drafts(pair: Pair, tolerance: float) -> None:
    """Steps of a graph whose kernel stores the keys and values itself, each of which reads those of the one before."""
    pair.run(pair.plan({"a": 150, "b": 70}))
    shape = short_shapes(pair)[0]
    for num_tokens in ({"a": 4, "b": 2, "c": 1}, {"a": 1, "b": 8, "c": 7}, {"b": 8, "a": 4}, {"a": 1, "c": 3, "b": 1}):
        step = pair.plan({name: min(number, shape.chunk) for name, number in num_tokens.items()})
        assert pair.kernels.captured_shape(step) == shape
        for out, expected in pair.run(step, padded_num_rows=40, shape=shape):
            assert relative_error(out[: len(step.positions)], expected) < tolerance


@pytest.mark.parametrize("options", OPTIONS)
def test_drafts_with_every_option(kernels: Kernels, options: str) -> None:
    check_drafts(Pair(config_of(OPTIONS[options]), kernels), kernels.tolerance)


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [(torch.int8, 1e-3), (torch.float8_e4m3fn, 1e-3)], ids=str)
def test_drafts_over_caches_of_8_bits(kernels: Kernels, cache_dtype: torch.dtype, tolerance: float) -> None:
    if kernels.device.type == "cpu" and cache_dtype == torch.float8_e4m3fn:
        tolerance = 0.2  # as above
    config = config_of(AttentionOptions(has_sinks=True))
    check_drafts(Pair(config, kernels, cache_dtype=cache_dtype, scales=SCALES), tolerance)


def test_the_kernels_of_graphs_of_drafts_are_compiled_at_the_start(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each window, too: before a capture only one layer of those that differ in nothing else is run."""
    backend, launched = Pair(config_of(AttentionOptions()), kernels).kernels, set()

    def note(*arguments: object) -> None:
        launched.add((arguments[9], arguments[-1] is not None))  # the window, and whether keys are stored

    def nothing(*arguments: object, **further: object) -> None:
        pass

    recording = replace(
        backend._kernels, attend_short_chunks=note, append=nothing, attend=nothing, decode=nothing
    )
    monkeypatch.setattr(backend, "_kernels", recording)
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    backend._compile_prompts(MAX_MODEL_LEN)
    assert {(None, True), (40, True)} <= launched


@pytest.mark.parametrize(("num_kv_heads", "shortest", "few"), [(4, 4096, 16), (1, 2048, 4)])
def test_longer_chunks_are_split_and_captured_behind_long_contexts_only(
    kernels_as_they_are: Kernels, num_kv_heads: int, shortest: int, few: int
) -> None:
    pair = Pair(config_of(AttentionOptions(), num_kv_heads), kernels_as_they_are)
    pair.plan({"long": shortest - 2 * few - 1, "short": 100})
    assert chunk_of(pair, {"long": few, "short": few}) == few, "few rows, behind any context"
    assert chunk_of(pair, {"long": few, "short": few + 1}) is None
    assert chunk_of(pair, {"long": few + 1, "short": 1}) == 64
    assert chunk_of(pair, {"long": few + 1, "short": few + 1}) is None, "not every chunk is split"


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 32, 128), (32, 8, 128), (7, 1, 64)])
def test_drafts_in_bfloat16(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    config = make_config(num_heads, num_kv_heads, head_dim, (None, 100))
    scales = None if cache_dtype is None else SCALES
    pair = Pair(config, kernels, torch.bfloat16, cache_dtype=cache_dtype, scales=scales)
    check_drafts(pair, 8e-3 if cache_dtype is None else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_one_graph_replays_every_step_of_short_chunks(kernels: Kernels, num_kv_heads: int) -> None:
    config = make_config(8, num_kv_heads, 64, (None, 100))
    pair = Pair(config, kernels, torch.bfloat16)
    backend, num_rows = pair.kernels, 32
    qkv = torch.zeros(num_rows, config.qkv_size, dtype=torch.bfloat16, device=pair.device)
    outs = torch.empty(2, num_rows, config.attn_size, dtype=torch.bfloat16, device=pair.device)
    graphs = {}
    empty = build_step_metadata(*np.zeros((3, 0), np.int64), np.zeros((0, 0), np.int32), pair.block_size)
    with torch.inference_mode():
        for shape in short_shapes(pair):
            graphs[shape] = torch.cuda.CUDAGraph()
            backend.begin_step(empty, num_rows, shape)
            backend.forward(0, qkv, outs[0])
            torch.cuda.synchronize()
            with torch.cuda.graph(graphs[shape]):
                for layer in range(2):
                    backend.forward(layer, qkv, outs[layer])
    pair.check({"a": 1800, "b": 3})
    replayed = set()
    for num_tokens in ({"a": 2, "b": 2}, {"a": 26, "c": 5}, {"c": 1, "d": 31}, {"a": 2, "d": 1}, {"b": 20}):
        step = pair.plan(num_tokens)
        shape, num_tokens_of_step = backend.captured_shape(step), len(step.positions)
        assert shape is not None
        replayed.add(shape)
        with torch.inference_mode():
            qkv.copy_(pair.make_qkv(num_rows))
            backend.begin_step(step, num_rows, shape)
            graphs[shape].replay()
            pair.reference.begin_step(step)
            for layer in range(2):
                expected = torch.empty(num_tokens_of_step, config.attn_size, device=pair.device)
                pair.reference.forward(layer, qkv[:num_tokens_of_step].float(), expected)
                assert relative_error(outs[layer, :num_tokens_of_step], expected) < TOLERANCES[torch.bfloat16]
    assert replayed == set(graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 32, 128), (32, 8, 128), (7, 1, 64), (8, 1, 512)]
)
def test_shapes_of_models_in_bfloat16(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    config = make_config(num_heads, num_kv_heads, head_dim, (None, 300))
    pair = Pair(config, kernels, torch.bfloat16, cache_dtype=cache_dtype, scales=SCALES if cache_dtype else None)
    pair.run(pair.plan({"a": 2000, "b": 40}))
    pair.run(pair.plan({"a": 1500, "c": 400}))
    for num_tokens in STEPS * 2:
        for out, expected in pair.run(pair.plan(num_tokens)):
            assert relative_error(out, expected) < (8e-3 if cache_dtype is None else 2e-2)
