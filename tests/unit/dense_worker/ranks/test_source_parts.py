"""Parts of what a checkpoint fills equal parts of the whole, whichever pieces they are made of."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.common.families.names import names_of
from services.common.model_config import load_model_config
from services.dense_worker.model.checkpoint import MatrixRows, open_checkpoint
from services.dense_worker.model.weights import empty_weights, fill, places
from services.dense_worker.parameters import Pieces, TensorPart, parameters
from services.dense_worker.ranks.source_parts import part_of
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}


def pieces_of(size: int, generator: random.Random) -> Pieces:
    """One to three pieces of so many rows or columns."""
    num_pieces = generator.randint(1, min(3, (size + 1) // 2))
    ends = sorted(generator.sample(range(size + 1), 2 * num_pieces))
    return tuple(zip(ends[::2], ends[1::2], strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_any_pieces_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """Also those that begin within a word, or a group, that others share."""
    path = make_model_dir(tmp_path / "model", "llama", **SIZES | FORMATS[name].fields)
    quantize_model_dir(path, FORMATS[name])
    config, generator = load_model_config(path), random.Random(name)
    whole = empty_weights(config, torch.float32, torch.device("cpu"))
    with open_checkpoint(path, names_of(config).canonical) as checkpoint:
        for parameter in parameters(whole.layers[0]):
            for source, place in places(parameter):
                fill(checkpoint, source, place)
                for dim in range(place.dim()):
                    pieces = pieces_of(place.shape[dim], generator)
                    part = part_of(source, tuple(place.shape[1:]), TensorPart((None,) * dim + (pieces,)))
                    expected = torch.cat([place.narrow(dim, first, end - first) for first, end in pieces], dim)
                    found = torch.empty_like(expected)
                    fill(checkpoint, part, found)
                    assert part.num_rows == len(found)
                    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (source.name, pieces)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dims", [None, (((0, 2), (3, 5)),), (None, ((1, 3),))])
def test_parts_of_rows_of_a_stack_of_matrices(dims: tuple[Pieces | None, ...] | None, is_transposed: bool) -> None:
    """One of a mixture's projections, of which a file has all experts in one tensor."""
    matrices = torch.arange(3 * 12 * 4).view(3, 12, 4)
    stack = matrices.transpose(1, 2) if is_transposed else matrices
    part = None if dims is None else TensorPart(dims)
    rows = matrices[2, 4:10]
    expected = rows if part is None else part.of(rows)
    assert torch.equal(MatrixRows(2, slice(4, 10), is_transposed).of(stack, part), expected)
