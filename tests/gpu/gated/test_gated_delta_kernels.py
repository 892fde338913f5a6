"""Gated delta layers: our kernel gives the results and the states of the torch reference."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from services.attn_worker.cache.state_group import StateWave, null_slot, zero_slot
from services.attn_worker.layers.recurrent.torch_recurrences import TorchRecurrences
from services.common.attention.learned import Learned
from services.common.errors import CapacityError
from services.common.families.shape import GatedDelta
from tests.support.attention.gated_layers import (
    make_gated_spec,
    random_gated_weights,
    random_rows,
    recurrent_step,
    true_values,
)

NUM_SLOTS, MAX_NUM_SEQS, MAX_NUM_TOKENS = 12, 6, 512
ZERO, NULL = zero_slot(NUM_SLOTS), null_slot(NUM_SLOTS)
CASES = {
    "grouped": GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, conv_size=4),
    "odd sizes": GatedDelta(num_key_heads=1, num_value_heads=3, key_dim=12, value_dim=40, conv_size=3),
    "one head": GatedDelta(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=16, conv_size=2),
}
PUBLISHED = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_size=4)
# Sums in another order, and by another formula in chunks; with 16 bits, one rounding of the convolution's sums and one
# of the output may be to the other neighbour.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BOTH_WAYS = pytest.mark.usefixtures("way")


@pytest.fixture(params=[1000, 16], ids=["tokens", "chunks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, or in chunks also where these are slower."""
    triton = pytest.importorskip("services.attn_worker.layers.recurrent.triton_recurrences", reason="needs triton")
    monkeypatch.setattr(triton, "MIN_CHUNKED_TOKENS", request.param)


class Pair:
    """The kernels and the reference run the same steps of two layers."""

    def __init__(self, sizes: GatedDelta, device: torch.device, dtype: torch.dtype) -> None:
        kernels = "services.attn_worker.layers.recurrent.triton_recurrences"
        triton = pytest.importorskip(kernels, reason="needs triton")
        if device.type == "cpu" and dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter does not round to the nearest bfloat16")
        spec = make_gated_spec(sizes, NUM_SLOTS, num_layers=2)
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.reference = TorchRecurrences(spec, device)
        limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_tokens": MAX_NUM_TOKENS}
        self.kernels = triton.TritonRecurrences(spec, dtype, device, **limits)
        weights = {layer: random_gated_weights(sizes, layer) for layer in range(2)}
        for backend in (self.reference, self.kernels):
            backend.use_learned(Learned(recurrences=weights))
        self.seed = 0

    def step(self, *waves: Iterable[tuple[int, int, int, int]], padded: int | None = None) -> None:
        """Runs (first_row, num_tokens, source, target) of each wave in both layers and compares the outputs."""
        made = [make_wave(parts) for parts in waves]
        num_tokens, step = sum(sum(wave.num_tokens) for wave in made), recurrent_step(*made)
        num_rows = num_tokens if padded is None else padded
        self.reference.begin_step(step)
        self.kernels.begin_step(step, padded)
        for layer in range(2):
            self.seed += 1
            rows = random_rows(self.sizes, num_rows, self.seed).to(self.device, self.dtype)
            expected, found = (torch.full_like(rows[:, : self.sizes.value_size], 7.0).contiguous() for _ in range(2))
            self.reference.forward(layer, rows, expected)
            self.kernels.forward(layer, rows, found)
            check(found[:num_tokens], expected[:num_tokens], self.dtype)
            assert not found[num_tokens:].any(), "padding becomes zero"


def make_wave(parts: Iterable[tuple[int, int, int, int]]) -> StateWave:
    wave = StateWave()
    for part in parts:
        wave.add(*part)
    return wave


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@BOTH_WAYS
@pytest.mark.parametrize("case", CASES)
def test_prompts_in_parts_and_decoding_give_the_same(kernel_device: torch.device, case: str) -> None:
    pair = Pair(CASES[case], kernel_device, torch.float32)
    pair.step([(0, 9, ZERO, 0), (9, 1, ZERO, 1), (10, 3, ZERO, NULL)])
    pair.step([(0, 2, 0, 2), (2, 1, 1, 3)])
    pair.step([(0, 5, ZERO, 4), (5, 1, 2, 5), (6, 4, 3, 6)], [(10, 3, 6, 7)], [(13, 1, 7, 8)])
    pair.step([(0, 1, 4, 0), (1, 1, 5, 1), (2, 1, 8, 2), (3, 1, 6, 3)], padded=6)
    pair.step([(0, 1, 0, 4), (1, 1, 3, 5)])
    pair.step([(0, 37, 4, 0), (37, 16, 5, 1)], [(53, 17, 1, 2)])  # the convolution takes them in pieces


@pytest.mark.parametrize("case", ["random", "equal keys", "no decay", "all decays", "no strength"])
def test_chunks_give_what_transformers_gives_token_by_token(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Sequences of different lengths in one step, and a second step that goes on with them."""
    triton = pytest.importorskip("services.attn_worker.layers.recurrent.triton_recurrences", reason="needs triton")
    monkeypatch.setattr(triton, "MIN_CHUNKED_TOKENS", 16)
    sizes = GatedDelta(num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=40, conv_size=4)
    spec = make_gated_spec(sizes, NUM_SLOTS)
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_tokens": MAX_NUM_TOKENS}
    kernels = triton.TritonRecurrences(spec, torch.float32, kernel_device, **limits)
    weights = random_gated_weights(sizes)
    kernels.use_learned(Learned(recurrences={0: weights}))
    first, second = (67, 16, 1), (16, 2, 30)
    sequences = [random_rows(sizes, sum(lengths), seed) for seed, lengths in enumerate(zip(first, second, strict=True))]
    for rows in sequences:
        strength, decay = rows[:, sizes.conv_dim :].split(sizes.num_value_heads, dim=1)
        if case == "equal keys":
            rows[:, : 2 * sizes.key_size] = rows[0, : 2 * sizes.key_size]
            strength += 10
        if case in ("equal keys", "no decay"):
            decay -= 30
        if case == "all decays":
            decay += 80
        if case == "no strength":
            strength -= 40
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    begun = [0] * len(sequences)
    for step, lengths in enumerate((first, second)):
        wave, first_row = StateWave(), 0
        for index, length in enumerate(lengths):
            wave.add(first_row, length, index if step else ZERO, index + 3 * step)
            first_row += length
        pieces = [rows[at : at + length] for rows, at, length in zip(sequences, begun, lengths, strict=True)]
        out = torch.full((first_row, sizes.value_size), 7.0, device=kernel_device)
        kernels.begin_step(recurrent_step(wave))
        kernels.forward(0, torch.cat(pieces).to(kernel_device), out)
        for index, values in enumerate(out.cpu().split(lengths)):
            found[index].append(values)
            begun[index] += lengths[index]
    for rows, values in zip(sequences, found, strict=True):
        check(torch.cat(values), true_values(rows, weights, sizes), torch.float32)


def test_a_step_beyond_the_limits_is_an_error(kernel_device: torch.device) -> None:
    pair = Pair(CASES["one head"], kernel_device, torch.float32)
    with pytest.raises(CapacityError, match=r"a step has 7 sequences and 7 tokens, .* made for 6 and 512"):
        pair.kernels.begin_step(recurrent_step(make_wave((row, 1, ZERO, row) for row in range(7))))
    with pytest.raises(CapacityError, match="a step has 1 sequences and 513 tokens"):
        pair.kernels.begin_step(recurrent_step(make_wave([(0, 500, ZERO, 0)]), make_wave([(500, 13, 0, 1)])))


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_give_the_same(kernel_device: torch.device, dtype: torch.dtype) -> None:
    pair = Pair(CASES["grouped"], kernel_device, dtype)
    pair.step([(0, 20, ZERO, 0), (20, 1, ZERO, 1)])
    for _ in range(3):
        pair.step([(0, 1, 0, 2), (1, 1, 1, 3)])
        pair.step([(0, 1, 2, 0), (1, 1, 3, 1)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too slow in the interpreter")
@BOTH_WAYS
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_published_sizes(kernel_device: torch.device, dtype: torch.dtype) -> None:
    pair = Pair(PUBLISHED, kernel_device, dtype)
    pair.step([(0, 300, ZERO, 0), (300, 64, ZERO, 1), (364, 1, ZERO, 2)], [(365, 100, 1, 3)])
    for _ in range(4):
        pair.step([(0, 1, 0, 4), (1, 1, 3, 5), (2, 1, 2, 6)], padded=4)
        pair.step([(0, 1, 4, 0), (1, 1, 5, 3), (2, 1, 6, 2)], padded=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_reads_the_slots_of_each_step() -> None:
    device, sizes = torch.device("cuda"), CASES["grouped"]
    pair = Pair(sizes, device, torch.float32)
    rows = torch.zeros(4, sizes.row_size, device=device)
    out = torch.zeros(4, sizes.value_size, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pair.kernels.begin_step(recurrent_step(StateWave()), 4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pair.kernels.forward(0, rows, out)
        for seed, parts in enumerate(
            ([(0, 1, ZERO, 0), (1, 1, ZERO, 1)], [(0, 1, 1, 2), (1, 1, 0, 3), (2, 1, ZERO, 4)], [(0, 1, 2, 0)])
        ):
            step = recurrent_step(make_wave(parts))
            rows.copy_(random_rows(sizes, 4, seed))
            pair.reference.begin_step(step)
            expected = torch.zeros_like(out)
            pair.reference.forward(0, rows, expected)
            pair.kernels.begin_step(step, 4)
            graph.replay()
            check(out, expected, torch.float32)
    torch.cuda.synchronize()
