"""What a sequence reports of its cross attention, compared with the arithmetic of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.whisper.generation_whisper import _median_filter

from services.common.families.shape import LayerHeads
from services.dense_worker.features.source.alignment import Alignment, distances, medians
from services.pb import source_pb2

NUM_HEADS, HEAD_DIM, NUM_SOURCE_ROWS, NUM_ROWS, NUM_TOKENS, FIRST, WIDTH = 4, 8, 30, 22, 17, 3, 7
HEADS = [(0, 1), (2, 3), (0, 2), (2, 0)]
LAYERS = {layer: LayerHeads(NUM_HEADS, NUM_HEADS, HEAD_DIM, is_cross=True) for layer in (1, 3, 5)}


def alignment() -> Alignment:
    heads = [source_pb2.AlignmentHead(layer=layer, head=head) for layer, head in HEADS]
    request = source_pb2.Alignment(first_token=FIRST, num_rows=NUM_ROWS, heads=heads, filter_width=WIDTH)
    return Alignment(request, NUM_TOKENS, LAYERS, None)


def inputs(seed: int) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Keys with values, and queries, by layer."""
    generator = torch.Generator().manual_seed(seed)
    size = NUM_HEADS * HEAD_DIM
    keys = {layer: torch.randn(NUM_SOURCE_ROWS, 2 * size, generator=generator) for layer in LAYERS}
    return keys, {layer: torch.randn(NUM_TOKENS, size, generator=generator) for layer in LAYERS}


def expected(keys: dict[int, torch.Tensor], queries: dict[int, torch.Tensor]) -> torch.Tensor:
    found = []
    for number, head in HEADS:
        layer, part = list(LAYERS)[number], slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        weights = (queries[layer][:, part] @ keys[layer][:, part].T / HEAD_DIM**0.5).softmax(1)[FIRST:, :NUM_ROWS]
        deviation, mean = weights.std(0, unbiased=False), weights.mean(0)
        found.append(_median_filter(((weights - mean) / deviation)[None, None], WIDTH)[0, 0])
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("cuts", [(), (2,), (3,), (1, 9), (5, 6, 16)])
def test_it_is_the_same_however_the_prompt_is_cut(cuts: tuple[int, ...]) -> None:
    keys, queries = inputs(seed=len(cuts))
    found, of_sequence = [], alignment()
    for layer in of_sequence.layers:
        of_sequence.take_keys(layer, keys[layer])
    for start, end in zip((0, *cuts), (*cuts, NUM_TOKENS), strict=True):
        found += [of_sequence.take_queries(layer, queries[layer][start:end], start) for layer in LAYERS]
    [answer] = [each for each in found if each is not None]
    torch.testing.assert_close(answer, expected(keys, queries), atol=2e-5, rtol=2e-5)


def test_a_prompt_that_begins_again_overwrites_what_there_was() -> None:
    old_keys, old_queries = inputs(seed=7)
    keys, queries = inputs(seed=8)
    of_sequence = alignment()
    for layer in of_sequence.layers:
        of_sequence.take_keys(layer, old_keys[layer])
        of_sequence.take_queries(layer, old_queries[layer][:9], 0)
    for layer in of_sequence.layers:
        of_sequence.take_keys(layer, keys[layer])
    [answer] = [
        each for layer in LAYERS if (each := of_sequence.take_queries(layer, queries[layer], 0)) is not None
    ]
    torch.testing.assert_close(answer, expected(keys, queries), atol=2e-5, rtol=2e-5)


def test_a_column_that_all_tokens_attend_to_alike_says_nothing() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.5], [0.0, 0.25, 0.1]])
    torch.testing.assert_close(distances(weights), torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]))


@pytest.mark.parametrize(("num_columns", "width"), [(20, 7), (3, 7), (4, 7), (20, 1)])
def test_medians_are_those_of_transformers(num_columns: int, width: int) -> None:
    values = torch.randn(150, num_columns, generator=torch.Generator().manual_seed(num_columns))
    assert torch.equal(medians(values, width), _median_filter(values[None, None], width)[0, 0])
