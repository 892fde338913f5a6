"""Layers of towers that are captured by numbers of patches, against the same layers one by one. Nothing is captured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.quantization.schemes import fp8_towers
from services.common.vision.vision_config import VisionConfig, load_vision_config
from services.dense_worker.encoders import packed_attention
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision import tower_graphs
from services.dense_worker.encoders.vision.load import StoredTower
from services.dense_worker.encoders.vision.operations import TorchTowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.qwen_vl import QwenVisionTower
from services.dense_worker.encoders.vision.tower_graphs import TowerGraphs
from tests.support.dense.vision_models import make_vision_model, noise, run_tower

STEP, MAX_PATCHES = 64, 320


class Uncaptured:
    """Runs what would be captured, also when it would be."""

    def __init__(self, run: Callable[[int], None]) -> None:
        self.run = run
        self.sizes: list[int] = []

    def find(self, size: int) -> Uncaptured:
        if size not in self.sizes:
            self.run(size)
        self.sizes.append(size)
        return self

    def replay(self) -> None:
        self.run(self.sizes[-1])


def attend_where_they_lie(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """What the kernel of FlashAttention does, with no meaning where no sequence is."""
    out, ends = torch.full_like(q, float("nan")), sequences.cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        assert end - start <= sequences.max_length
        heads = [each[start:end].transpose(0, 1) for each in (q, k, v)]
        out[start:end] = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1)
    return out


def pictures_of(vision: VisionConfig, *sizes: tuple[int, int]) -> list[Picture]:
    """Of random pixels with these heights and widths."""
    found = []
    for seed, (height, width) in enumerate(sizes):
        shape = vision.layout.shape_of(height, width, is_low=False)
        tiles = [np.asarray(tile) for tile in vision.layout.tiles_of(noise(height, width, seed), shape)]
        found.append(Picture(str(seed), shape, torch.from_numpy(np.stack(tiles))))
    return found


@pytest.mark.parametrize("variant", ["qwen2_5_vl", "qwen3_vl"])
def test_pictures_of_any_sizes_give_the_rows_of_the_tower(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower_graphs, "_STEP", STEP)
    monkeypatch.setattr(tower_graphs, "_PATCHES_PER_PICTURE", STEP)
    path = make_vision_model(tmp_path, variant)
    vision = load_vision_config(path)
    assert vision is not None
    tower = StoredTower(vision, path, torch.float32, torch.device("cpu"), None).load().tower
    assert isinstance(tower, QwenVisionTower)
    graphs = list[Uncaptured]()

    def graphs_of(run: Callable[[int], None]) -> Uncaptured:
        graphs.append(Uncaptured(run))
        return graphs[0]

    captured = TowerGraphs(tower, TorchTowerOperations(), MAX_PATCHES, graphs_of)
    side = tower.config.patch_size * tower.config.merge_size
    runs: list[tuple[list[tuple[int, int]], int | None]] = [
        ([(7, 9)], 256),  # in squares: 252 patches
        ([(5, 4)], 128),  # captured behind a larger one, whose layout has numbers that a smaller one has no places for
        ([(2, 2)] * 5, 320),  # each needs a place
        ([(8, 3), (2, 7)], 192),
        ([(5, 4)], 128),  # again, before what a longer run has left
        ([(8, 8), (8, 3)], None),  # more patches than any graph has
        ([(2, 1)] * 6, None),  # more pictures
    ]
    for sizes, expected in runs:
        pictures = pictures_of(vision, *((rows * side, columns * side) for rows, columns in sizes))
        before = len(graphs[0].sizes)
        reference = run_tower(tower, pictures, vision.pixels)
        with monkeypatch.context() as patched:
            if expected is not None:
                patched.setattr(packed_attention, "suits_flash_kernel", lambda *_: True)
                patched.setattr(packed_attention, "_attend_unpadded", attend_where_they_lie)
            parts = captured.parts(pictures, vision.pixels)
            while True:
                try:
                    next(parts)
                except StopIteration as ended:
                    found = ended.value
                    break
        assert graphs[0].sizes[before:] == ([] if expected is None else [expected])
        for each, rows in zip(found, reference, strict=True):
            torch.testing.assert_close(each, rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["qwen2_5_vl", "qwen3_vl"])
def test_fp8_moves_the_rows_by_little(variant: str, tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, variant)
    vision = load_vision_config(path)
    assert vision is not None
    found = []
    for quantization in (None, fp8_towers()):
        tower = StoredTower(vision, path, torch.float32, torch.device("cpu"), None, quantization).load().tower
        found.append(torch.cat(run_tower(tower, pictures_of(vision, (50, 37), (20, 60)), vision.pixels)))
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0.0 < error < 0.08
