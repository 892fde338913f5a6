"""Prepares and loads the drafter that `scheduler.speculation` names, and makes the `Drafting` that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.config import Config, SchedulerSection
from services.common.families.shape import ModelConfig
from services.common.lifeline import Lifeline
from services.common.resolve import ResolvedModel
from services.dense_worker.features.drafting.draft_model.device_draft_model import DeviceDraftModel
from services.dense_worker.features.drafting.draft_model.load import held_draft_model, load_draft_model
from services.dense_worker.features.drafting.draft_model.model import DraftModel
from services.dense_worker.features.drafting.drafter import Drafter
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.eagle.device_eagle import DeviceEagle
from services.dense_worker.features.drafting.eagle.load_eagle import (
    LoadedHead,
    find_eagle_head,
    load_eagle_head,
    make_eagle_model,
)
from services.dense_worker.features.drafting.kv_cache.draft_blocks import MAX_LATE_TOKENS
from services.dense_worker.features.drafting.measured_drafting import ForcedDrafting, MeasuredDrafting
from services.dense_worker.features.drafting.medusa.heads import DeviceHeads, MedusaHeads
from services.dense_worker.features.drafting.medusa.load_heads import find_medusa_heads, load_medusa_heads
from services.dense_worker.features.drafting.medusa.medusa_drafter import MedusaDrafter
from services.dense_worker.features.drafting.model_drafter import ModelDrafter
from services.dense_worker.features.drafting.ngram.answer_history import AnswerHistory
from services.dense_worker.features.drafting.ngram.ngram_predictor import NgramDrafter
from services.dense_worker.features.drafting.step_costs import StepCosts
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import whole_embedding
from services.dense_worker.sampling.sampler import Sampler

# Few lengths, because each takes memory and time; a longer match tells more about how a text goes on.
SUFFIX_LENGTHS = (3, 6, 12)

MakeDrafter = Callable[[ModelWeights, Sampler], Drafter]


@dataclass(frozen=True, slots=True)
class PreparedDrafter:
    """A drafter whose weights are not in memory yet."""

    # Returns what makes the drafter, given the served model's weights and sampler. Both raise `ModelError` or
    # `ConfigError`, naming value and limit, and `CapacityError` if a GPU has no room.
    load: Callable[[], MakeDrafter]
    held: HeldWeights[Any] | None = None  # its weights at the launcher; None: it has none of its own, or there is none


def prepare_drafter(config: Config, model: ResolvedModel, lifeline: Lifeline | None) -> PreparedDrafter | None:
    """None: speculation is off. `lifeline`: to the launcher, which may have its weights in memory.

    Raises `ModelError`, naming value and limit, for a drafter that is not the model's.
    """
    section = config.scheduler
    if section.speculation == "off":
        return None
    if section.speculation == "medusa":
        heads = find_medusa_heads(section, model)
        held_heads = lifeline and HeldWeights(lifeline, heads.digest, heads.empty, model.device)
        return PreparedDrafter(lambda: _medusa(load_medusa_heads(heads, held_heads), section), held_heads)
    if section.speculation == "eagle3":
        head = find_eagle_head(section, model)
        held_head = lifeline and HeldWeights(lifeline, head.digest, head.empty, model.device)
        return PreparedDrafter(lambda: _eagle(load_eagle_head(head, held_head), config, model), held_head)
    if section.speculation == "draft_model":
        source = config.model
        held = lifeline and held_draft_model(section, source, model, lifeline)
        return PreparedDrafter(lambda: _draft_model(load_draft_model(section, source, model, held), section), held)
    return PreparedDrafter(lambda: _ngram(section))


def _medusa(heads: MedusaHeads, section: SchedulerSection) -> MakeDrafter:
    return lambda weights, sampler: MedusaDrafter(DeviceHeads(heads, section.max_num_seqs), heads.num_heads)


def _eagle(head: LoadedHead, config: Config, model: ResolvedModel) -> MakeDrafter:
    section = config.scheduler

    def make(weights: ModelWeights, sampler: Sampler) -> Drafter:
        embedding = weights.embedding.table.data
        if model.rank.count > 1 and not head.has_embedding:  # this rank has a part of it
            embedding = whole_embedding(config.model, model.config, model.dtype, model.device)
        eagle = make_eagle_model(head, embedding, section, model)
        on_device = DeviceEagle(eagle, sampler, section.max_num_seqs, section.max_num_batched_tokens)
        return ModelDrafter(on_device, section.num_speculative_tokens, max_late_tokens=None)

    return make


def _draft_model(draft_model: DraftModel, section: SchedulerSection) -> MakeDrafter:
    def make(weights: ModelWeights, sampler: Sampler) -> Drafter:
        on_device = DeviceDraftModel(draft_model, sampler, section.max_num_seqs)
        return ModelDrafter(on_device, section.num_speculative_tokens, MAX_LATE_TOKENS)

    return make


def _ngram(section: SchedulerSection) -> MakeDrafter:
    if section.speculation == "ngram":
        return lambda weights, sampler: NgramDrafter(range(section.prompt_lookup_min, section.prompt_lookup_max + 1))
    history = AnswerHistory(SUFFIX_LENGTHS, section.suffix_cached_tokens)
    return lambda weights, sampler: NgramDrafter(SUFFIX_LENGTHS, history)


def make_drafting(section: SchedulerSection, config: ModelConfig, drafter: Drafter | None) -> Drafting:
    """What decides when steps have this drafter's tokens; None: they have only those that grammars force.

    config: of the model. With recurrent layers no step has drafts: a death in such a step would need states between
    them. With several lanes neither: a step with drafts cannot be planned before the one before it has ended.
    """
    costs = StepCosts(section.max_num_seqs, section.max_num_batched_tokens)
    if drafter is None:
        return Drafting() if config.recurrent_layers or section.num_lanes > 1 else ForcedDrafting(costs)
    return MeasuredDrafting(drafter, section.num_speculative_tokens, costs)
