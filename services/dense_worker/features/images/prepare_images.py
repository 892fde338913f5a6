"""Prepares and loads the feature "images": the tower of the served model, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.common.config import Config
from services.common.gpu import naming_what_needs_memory
from services.common.lifeline import Lifeline
from services.common.quantization.schemes import fp8_towers
from services.common.resolve import ResolvedModel
from services.common.vision.vision_config import VisionConfig, load_vision_config, why_blind
from services.dense_worker.encoders.encoder_runs import EncoderRuns
from services.dense_worker.encoders.vision.load import StoredTower, TowerWeights, load_tower
from services.dense_worker.encoders.vision.tensorrt.tower_plans import TowerPlans, find_or_build_tower
from services.dense_worker.encoders.vision.vision_encoder import VisionEncoder
from services.dense_worker.features.images.images_feature import ImagesFeature
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.tensorrt.gpu import on_device
from services.dense_worker.tensorrt.prepare import TensorRTPlans, build_command
from services.dense_worker.tensorrt.profiles import Limits

log = structlog.get_logger()

_MAX_RUNS = 2  # a tower takes less time than a step with a prompt, behind which the next one would wait


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """A tower whose weights are not in memory yet."""

    vision: VisionConfig
    model: ResolvedModel
    config: Config
    stored: StoredTower
    held: HeldWeights[TowerWeights] | None  # its memory at the launcher; None: there is none
    plans: TowerPlans | None  # of TensorRT; None: torch runs all of it

    @property
    def num_bytes(self) -> int:
        """The size of the weights."""
        return self.stored.num_bytes

    def load(self) -> ImagesFeature:
        """Loads the tower. Raises what `load_tower` raises."""
        model, vision = self.model, self.vision
        tower = load_tower(self.stored, self.held)
        with naming_what_needs_memory("the buffers of the tower"):
            encoder = VisionEncoder(
                tower, vision.pixels, model.dtype, model.device, self.config.dense.max_encoder_rows, self.plans
            )
            encoder.warm_up(vision.layout)
        log.info("pictures are served", family=vision.family, tower_bytes=self.num_bytes)
        dense, scheduler = self.config.dense, self.config.scheduler
        # The bits of a picture's rows depend on what a run computes beside it: here nothing.
        max_rows = 1 if dense.deterministic else dense.max_encoder_rows
        runs = EncoderRuns("images", encoder, max_rows, dense.encoder_cache_bytes, max_runs=_MAX_RUNS)
        return ImagesFeature(
            runs,
            vision.image_token_id,
            model.config.hidden_size,
            are_whole=model.config.attention.sees_spans,
            max_tokens=scheduler.max_num_batched_tokens - scheduler.max_num_seqs,
        )


def prepare_images(
    config: Config,
    model: ResolvedModel,
    digest: str,
    lifeline: Lifeline | None,
    tensorrt: TensorRTPlans | None,
    report: Callable[[str], None],
) -> PreparedImages | None:
    """The tower of a model that sees pictures; None: it sees none, or they are off. digest: of the model's weights.

    tensorrt: what runs the text part; `report` receives lines about builds of the tower's plans.

    Raises `ModelError` for files that the tower cannot be made of, and what `find_or_build_tower` raises.
    """
    if why_no_pictures(config, model) is not None:
        return None
    vision = load_vision_config(config.model.path)
    assert vision is not None, "there is no reason against it"
    seed = config.model.dummy_seed if config.model.load_format == "dummy" else None
    is_planned = config.dense.backend == "tensorrt" and tensorrt is not None
    quantization = fp8_towers() if config.dense.quantization == "fp8" and not is_planned else None
    stored = StoredTower(vision, config.model.path, model.dtype, model.device, seed, quantization)
    held = None
    if lifeline is not None:
        held = HeldWeights(lifeline, f"{digest} tower", stored.empty, model.device)
    plans = None
    if is_planned:
        limits = Limits(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        command = build_command(config.dense, config.model, model, limits)
        with on_device(model.device):
            plans = find_or_build_tower(tensorrt, vision, model.dtype, command, report)
    return PreparedImages(vision, model, config, stored, held, plans)


def why_no_pictures(config: Config, model: ResolvedModel) -> str | None:
    """Why the dense worker takes no pictures; None: it does."""
    if not config.model.images:
        return "model.images is false"
    if config.scheduler.num_lanes > 1:
        return f"scheduler.num_lanes is {config.scheduler.num_lanes}, and a tower runs on the stream of one lane"
    if config.dense.deterministic and model.config.attention.sees_spans:
        return "dense.deterministic is true, and its attention lacks that the tokens of a picture see each other"
    vision = load_vision_config(config.model.path)
    if vision is not None and model.config.encoder is not None:
        return "the model's encoder reads them"
    if vision is None:
        return why_blind(config.model.path) or f"the model {config.model.path.name} has no tower that is supported"
    num_deep = vision.tower.width // model.config.hidden_size - 1  # vectors that are added after as many layers
    if model.rank.is_stage and num_deep >= (num_own := len(model.rank.layers(model.config.num_layers))):
        return (
            f"vectors of pictures are added after the first {num_deep} layers, and the first of"
            f" dense.pipeline_parallel_size stages has {num_own}: it needs {num_deep + 1}"
        )
    return None
