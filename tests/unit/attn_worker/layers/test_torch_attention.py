"""TorchAttention with every kind of step, head shape, window and rotary embedding; see `Harness` for the reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.common.errors import CapacityError, ConfigError
from tests.support.attention.harness import BLOCK_SIZE, CPU, HEAD_DIM, MAX_MODEL_LEN, TOLERANCES, Harness
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


HEADS = {"MHA": (4, 4), "GQA": (8, 2), "MQA": (4, 1)}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_prefill_chunks_decodes_and_mixed_batches(
    tmp_path: Path, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    harness = Harness(tmp_path, heads, dtype)
    for seq_id, prompt_len in enumerate([5, 1, 23, 16, 40]):
        harness.open(seq_id, prompt_len)
    harness.check((0, 5), (2, 10))  # first chunks of different lengths
    harness.check((0, 1))  # one decode alone
    harness.check((1, 1), (2, 7), (0, 1), (3, 16), (4, 17))  # decodes between first and later chunks
    harness.check((4, 23), (2, 6), (3, 1))
    for _ in range(5):
        harness.check((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))
    harness.check((3, 1), (1, 1))


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16, 29, 30])
def test_any_chunk_size_gives_the_same_prompt(tmp_path: Path, chunk_size: int) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 30)
    for start in range(0, 30, chunk_size):
        harness.check((0, min(chunk_size, 30 - start)))


@pytest.mark.parametrize("chunk_size", [3, 40])
def test_layers_with_and_without_a_sliding_window(tmp_path: Path, chunk_size: int) -> None:
    harness = Harness(
        tmp_path,
        family="qwen3",
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        num_hidden_layers=3,
    )
    assert harness.config.sliding_windows == (None, 6, 6)
    harness.open(0, 40)
    harness.open(1, 4)
    harness.check((1, 4))
    for start in range(0, 40, chunk_size):
        harness.check((0, min(chunk_size, 40 - start)), (1, 1))
    for _ in range(4):
        harness.check((0, 1), (1, 1))


ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "short_factor": [1 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [2 + 0.3 * i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_scaled_rope_with_prompts_above_and_below_the_original_length(tmp_path: Path, rope_type: str) -> None:
    rope_parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}
    harness = Harness(tmp_path, max_position_embeddings=32, rope_parameters=rope_parameters)
    harness.open(0, 50)
    harness.open(1, 12)
    harness.open(2, 30)
    harness.check((0, 50), (1, 12), (2, 30))
    for _ in range(25):  # sequences 1 and 2 grow past a maximum
        harness.check((0, 1), (1, 1), (2, 1))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_scaled_rope_does_not_depend_on_the_chunks_of_a_prompt(tmp_path: Path, rope_type: str) -> None:
    rope_parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}
    harness = Harness(tmp_path, max_position_embeddings=32, rope_parameters=rope_parameters)
    whole = Harness(tmp_path, max_position_embeddings=32, rope_parameters=rope_parameters)
    for each in (harness, whole):
        each.open(0, 50)
        each.inputs[0] = harness.inputs[0]
    chunks = [harness.step((0, num_tokens)) for num_tokens in (10, 25, 15)]
    for layer, expected in enumerate(whole.step((0, 50))):
        actual = torch.cat([outputs[layer] for outputs in chunks])
        torch.testing.assert_close(actual, expected, **TOLERANCES[torch.float32])
    harness.check((0, 1))


def test_uneven_lengths_split_into_several_groups(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    prompt_lens = [3, 80, 4, 5, 2, 70, 3]
    for seq_id, prompt_len in enumerate(prompt_lens):
        harness.open(seq_id, prompt_len)
    harness.check(*enumerate(prompt_lens))
    harness.check(*((seq_id, 30 if seq_id == 2 else 1) for seq_id in range(len(prompt_lens))))


def test_a_prefix_computed_by_another_sequence_is_read(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 12)
    harness.step((0, 12))
    result = open_sequence(harness.cache, 1, [0] * 12, 12)
    assert result.num_cached_tokens == 8
    harness.inputs[1], harness.prompt_lens[1], harness.lengths[1] = harness.inputs[0], 12, 8
    harness.check((1, 4), (0, 1))


def test_bad_values_stay_in_the_rows_of_their_own_sequence(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 6)
    harness.open(1, 7)
    harness.inputs[0][:, 2:] = torch.nan
    harness.inputs[0][:, 4:] = torch.inf
    outputs = harness.step((0, 6), (1, 7))
    for layer, out in enumerate(outputs):
        torch.testing.assert_close(out[6:], harness.reference(1, layer), **TOLERANCES[torch.float32])
    harness.cache.close_sequences([0])
    harness.open(2, 5)
    harness.check((1, 1), (2, 1))  # the rest of the block contains values of sequence 0
    harness.check((1, 1), (2, 4))


def test_rows_of_a_sequence_without_blocks_do_not_change_others(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.open(0, 6)
    planned = harness.cache.plan_step(make_plan([(77, 9, 0), (0, 6, 0), (78, 1, 3)]))
    assert sorted(planned.errors) == [77, 78]
    harness.backend.begin_step(planned.metadata)
    harness.lengths[0] = 6
    for layer in range(harness.config.num_layers):
        junk = torch.full((9, harness.config.qkv_size), torch.nan)
        out = torch.empty(16, harness.config.attn_size)
        harness.backend.forward(layer, torch.cat([junk, harness.inputs[0][layer, :6], junk[:1]]), out)
        torch.testing.assert_close(out[9:15], harness.reference(0, layer), **TOLERANCES[torch.float32])
    harness.cache.commit_step()
    harness.check((0, 1))


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1, 1])
def test_a_fork_shares_full_blocks_and_copies_the_last_one(tmp_path: Path, length: int) -> None:
    harness = Harness(tmp_path)
    harness.open(0, length)
    harness.check((0, length))
    num_used = harness.cache.num_used_blocks
    harness.check((0, 1), (1, 1), fork=(0, 1))
    has_part = length % BLOCK_SIZE > 0
    assert harness.cache.num_used_blocks - num_used == (1 if has_part else 2), "one new block per sequence in need"
    for _ in range(BLOCK_SIZE + 1):
        harness.check((1, 1), (0, 1))
    harness.check((2, 3), (0, 1), fork=(1, 2))
    harness.cache.close_sequences([0, 1])
    harness.check((2, BLOCK_SIZE))
    harness.cache.check_integrity()


def test_a_step_without_rows_works(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.backend.begin_step(harness.cache.plan_step(make_plan([])).metadata)
    config = harness.config
    harness.backend.forward(0, torch.empty(0, config.qkv_size), torch.empty(0, config.attn_size))


@pytest.mark.parametrize("windows", [(1, None), (7, 3), (BLOCK_SIZE, MAX_MODEL_LEN)], ids=str)
def test_the_windows_of_the_cache_spec_are_used(tmp_path: Path, windows: tuple[int | None, ...]) -> None:
    harness = Harness(tmp_path, windows=windows)
    assert harness.config.sliding_windows == (None, None)
    harness.open(0, 20)
    harness.open(1, 5)
    harness.check((0, 13), (1, 2))
    harness.check((1, 3), (0, 7))
    for _ in range(4):
        harness.check((0, 1), (1, 1))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16])
def test_a_cache_may_store_another_dtype_than_the_model_computes_in(tmp_path: Path, cache_dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, cache_dtype=cache_dtype)
    # A cache that stores float32 would differ by more than this; a key rounded to the next number differs by less.
    tolerance = {"rtol": 0, "atol": torch.finfo(cache_dtype).eps / 5}
    harness.open(0, 9)
    harness.open(1, 5)
    for advances in [((0, 9), (1, 5)), ((0, 1), (1, 2)), ((1, 1), (0, 1))]:
        for layer, out in enumerate(harness.step(*advances)):
            expected = torch.cat([harness.reference(seq_id, layer)[-n:] for seq_id, n in advances])
            torch.testing.assert_close(out, expected, **tolerance)


def test_numbers_beyond_the_dtype_of_the_cache_do_not_change_other_sequences(tmp_path: Path) -> None:
    harness = Harness(tmp_path, cache_dtype=torch.float16)
    harness.open(0, 6)
    harness.inputs[0] *= 1e30
    assert all(out.isfinite().all() for out in harness.step((0, 6)))
    harness.cache.close_sequences([0])
    harness.open(1, 5)  # the rest of its block contains values of sequence 0
    for layer, out in enumerate(harness.step((1, 5))):
        torch.testing.assert_close(out, harness.reference(1, layer), rtol=0, atol=2e-4)


def test_a_cache_dtype_without_a_definition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this KV cache is torch\.int16"):
        Harness(tmp_path, cache_dtype=torch.int16)


def test_the_error_for_a_cache_that_does_not_fit_names_its_size(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    spec = dataclasses.replace(harness.spec, num_blocks=10**13)
    with pytest.raises(CapacityError, match=f"{10**13 + 1} KV blocks need {(10**13 + 1) * 2048} bytes"):
        TorchAttention(BackendSetup(harness.config, spec, torch.float32, CPU, MAX_MODEL_LEN))
