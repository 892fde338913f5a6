"""Models that see pictures, with their true parts in both workers, compared with transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from services.common.errors import ConfigError, ModelError
from services.common.model_config import load_model_config
from services.common.vision.vision_config import VisionConfig, load_vision_config
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.onnxruntime_backend import OnnxRuntimeBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.encoders.vision.load import StoredTower, Tower
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.tensorrt.tower_networks import export_tower
from services.dense_worker.encoders.vision.tensorrt.tower_plans import PROFILES
from services.dense_worker.features.images.images_feature import whole_chunk
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments
from services.dense_worker.tensorrt.api import load_tensorrt
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.step.prompt_span import PromptSpan
from tests.support.dense.exported_towers import planned_operations
from tests.support.dense.vision_models import (
    IMAGE_TOKEN_ID,
    VARIANTS,
    load_true_model,
    make_vision_model,
    noise,
    run_tower,
    true_logits,
)
from tests.support.dense.whole_model import WholeModel
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)
# Both compute in float32, in another order of sums, of a few hundred numbers each: relative to the largest logit.
BOUND = 5e-5
NUM_DECODED = 5
CPU = torch.device("cpu")
TOKEN_IDS = {"picture": IMAGE_TOKEN_ID, "[IMG_BREAK]": 6, "[IMG_END]": 7, "<img>": 6, "</img>": 7}


class Prompt:
    """Text and pictures, as both sides read them."""

    def __init__(
        self,
        vision: VisionConfig,
        path: Path,
        parts: Sequence[list[int] | Image.Image],
        make_operations: Callable[[Tower], TowerOperations] | None = None,
    ) -> None:
        tower = StoredTower(vision, path, torch.float32, CPU, None).load().tower
        self.token_ids: list[int] = []
        self.images = [each for each in parts if not isinstance(each, list)]
        pictures, starts = [], []
        for each in parts:
            if isinstance(each, list):
                self.token_ids += each
                continue
            shape = vision.layout.shape_of(each.height, each.width, is_low=False)
            tiles = np.stack([np.asarray(tile) for tile in vision.layout.tiles_of(each, shape)])
            pictures.append(Picture(f"{len(pictures):02x}" + each.tobytes()[:31].hex(), shape, torch.from_numpy(tiles)))
            starts.append(len(self.token_ids))
            self.token_ids += [TOKEN_IDS[name] for name in vision.layout.tokens_of(shape, "picture")]
            assert len(self.token_ids) == starts[-1] + shape.num_tokens
        operations = None if make_operations is None else make_operations(tower)
        outputs = run_tower(tower, pictures, vision.pixels, operations) if pictures else []
        self.pictures = [
            (PromptSpan(start, p.shape.num_tokens, p.hash, p.shape.grid_rows, p.shape.grid_columns), output)
            for start, p, output in zip(starts, pictures, outputs, strict=True)
        ]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"), variant)


@pytest.fixture(scope="module")
def truth(path: Path, variant: str) -> PreTrainedModel:
    return load_true_model(path, variant)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def pick(logits: torch.Tensor) -> int:
    """The most likely token, but not that of pictures: transformers would look for another picture."""
    return int(logits.index_fill(0, torch.tensor([IMAGE_TOKEN_ID]), float("-inf")).argmax())


def test_pictures_in_chunks_decoding_and_prefix_cache(path: Path, variant: str, truth: PreTrainedModel) -> None:
    """Two pictures of other sizes; a second prompt has the first picture and another second one."""
    vision = load_vision_config(path)
    assert vision is not None
    start, between, end = [9, 10, 11], [12, 13, 14, 15, 16], [17, 18, 19]
    first_image, second_image, other_image = noise(30, 43, 1), noise(60, 20, 2), noise(60, 20, 3)
    first = Prompt(vision, path, [start, first_image, between, second_image, end])
    second = Prompt(vision, path, [start, first_image, between, other_image, end])
    model = WholeModel(path, max_model_len=512, num_blocks=256)
    model.image_token_id = vision.image_token_id
    expected = true_logits(truth, variant, first.token_ids, first.images)
    assert not torch.allclose(expected[-1], true_logits(truth, variant, second.token_ids, second.images)[-1])
    model.open(1, first.token_ids, pictures=first.pictures)
    rows, position = [], 0
    while position < len(first.token_ids):
        size = min(7, len(first.token_ids) - position)
        if model.config.attention.sees_spans:
            size = whole_chunk([span for span, _ in first.pictures], position, size, most=64)
        rows.append(model.step((1, size, position))[0])
        position += size
    check(torch.cat(rows), expected)
    num_cached = model.open(2, second.token_ids, pictures=second.pictures)
    shared = second.pictures[1][0].start
    assert shared - 4 < num_cached <= shared, "all up to the other picture, in whole blocks"
    found = model.step((2, len(second.token_ids) - num_cached, num_cached))[0]
    check(found, true_logits(truth, variant, second.token_ids, second.images)[num_cached:])
    token_ids, last = list(first.token_ids), rows[-1]
    for index in range(NUM_DECODED):
        token_id = pick(last[-1])
        token_ids.append(token_id)
        if index == 2:  # a fork goes on at the same positions
            model.cache.close_sequences([2])
            fork = (1, 3, len(token_ids) - 1)
            entry = (3, 1, len(token_ids) - 1)
            (last,) = model.step(entry, sampled=[(1, token_id)], forks=[fork], forced=[(3, token_id)])
            check(last, true_logits(truth, variant, token_ids, first.images)[-1:])
        (last,) = model.step((1, 1, len(token_ids) - 1), sampled=[] if index == 2 else [(1, token_id)])
    expected = true_logits(truth, variant, token_ids, first.images)
    assert token_ids[len(first.token_ids) :] == [pick(each) for each in expected[len(first.token_ids) - 1 : -1]]
    check(last, expected[-1:])


def test_exported_towers_and_segments(
    path: Path, variant: str, truth: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ONNX, with a tower in plans for a few rows, they give the logits of transformers. TensorRT-RTX builds them."""
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 16)
    vision, config = load_vision_config(path), load_model_config(path)
    assert vision is not None
    if variant == "blip2":
        with pytest.raises(ConfigError, match="the tower of 'blip-2' is not exported to ONNX"):
            export_tower(vision, torch.float32)
        return
    networks, trt = export_tower(vision, torch.float32), make_tensorrt("11.4.0")

    def make_operations(tower: Tower) -> TowerOperations:
        return planned_operations(trt, networks, tower, tmp_path / "stand-in")

    parts = [[9, 10, 11], noise(30, 43, 1), [12, 13], noise(60, 20, 2), [14]]
    prompt = Prompt(vision, path, parts, make_operations)
    assert {call[1:3] for call in trt.named("execute_async_v3")} >= {("end", 16), ("start", 16)}, "in several calls"
    if config.parts.experts is not None:
        model = WholeModel(path, max_model_len=512, num_blocks=256)
    else:
        segments = export_networks(config, torch.float32)

        def make_dense(weights: ModelWeights) -> DenseBackend:
            return TensorRTBackend(OnnxRuntimeBackend(segments, weights), TorchBackend(weights))

        model = WholeModel(path, make_dense, max_model_len=512, num_blocks=256)
    model.image_token_id = vision.image_token_id
    token_ids, position = list(prompt.token_ids), 0
    model.open(1, token_ids, pictures=prompt.pictures)
    for _ in range(NUM_DECODED):
        (logits,) = model.step((1, len(token_ids) - position, position), sampled=[(1, token_ids[-1])][: bool(position)])
        position = len(token_ids)
        expected = true_logits(truth, variant, token_ids, prompt.images)[-len(logits) :]
        check(logits, expected)
        token_ids.append(pick(logits[-1]))
        assert token_ids[-1] == pick(expected[-1])
    plans = EnginePlanBuilder(load_tensorrt(), None, PROFILES, EnginePlanCache(tmp_path / "rtx")).find_or_build(
        export_tower(vision, torch.bfloat16), torch.bfloat16, None, lambda line: None
    )
    assert plans.keys() == networks.keys() and {"tower_embed", "tower_start", "tower_end"} < plans.keys()
    assert all(len(each.plan) > 1000 for of_segment in plans.values() for each in of_segment)


def test_experts_of_qwen3_vl_may_be_stored_transposed(tmp_path: Path) -> None:
    """As the published files have them. transformers reads such files as the others, and saves them as they are here.
    """
    plain, published = (make_vision_model(tmp_path / name, "qwen3_vl_moe") for name in ("plain", "published"))
    stored = load_file(published / "model.safetensors")
    experts = [name for name in stored if ".mlp.experts." in name]
    assert len(experts) == 4, "gates with ups, and downs, in two layers"
    transposed = {name: stored[name].transpose(1, 2).contiguous() for name in experts}
    save_file(stored | transposed, published / "model.safetensors", metadata={"format": "pt"})
    truth = load_true_model(published, "qwen3_vl_moe").state_dict()
    assert all(torch.equal(truth[name], stored[name]) for name in experts)
    config = load_model_config(published)
    expected = dict(load_weights(plain, config, torch.float32, CPU).named_tensors())
    for name, tensor in load_weights(published, config, torch.float32, CPU).named_tensors():
        assert torch.equal(tensor, expected[name]), name
    save_file(stored | {experts[0]: stored[experts[0]][:, :7].contiguous()}, published / "model.safetensors")
    with pytest.raises(ModelError, match=r"has shape \(5, 7, \d+\), .* calls for \(5, \d+, \d+\) or \(5"):
        load_weights(published, config, torch.float32, CPU)
