"""Loads the drafter that `scheduler.speculation` names, and makes the `Drafting` that uses it."""

from __future__ import annotations

from collections.abc import Callable

from services.common.config import Config, SchedulerSection
from services.common.resolve import ResolvedModel
from services.dense_worker.features.drafting.draft_model.device_draft_model import DeviceDraftModel
from services.dense_worker.features.drafting.draft_model.load import load_draft_model
from services.dense_worker.features.drafting.drafter import Drafter
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.eagle.device_eagle import DeviceEagle
from services.dense_worker.features.drafting.eagle.load_eagle import load_eagle_head, make_eagle_model
from services.dense_worker.features.drafting.kv_cache.draft_blocks import MAX_LATE_TOKENS
from services.dense_worker.features.drafting.measured_drafting import MeasuredDrafting
from services.dense_worker.features.drafting.medusa.device_heads import DeviceHeads
from services.dense_worker.features.drafting.medusa.load_heads import load_medusa_heads
from services.dense_worker.features.drafting.medusa.medusa_drafter import MedusaDrafter
from services.dense_worker.features.drafting.model_drafter import ModelDrafter
from services.dense_worker.features.drafting.ngram.answer_history import AnswerHistory
from services.dense_worker.features.drafting.ngram.ngram_drafter import NgramDrafter
from services.dense_worker.features.drafting.step_costs import StepCosts
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.sampling.sampler import Sampler

# Few lengths, because each takes memory and time; a longer match tells more about how a text goes on.
SUFFIX_LENGTHS = (3, 6, 12)

MakeDrafter = Callable[[ModelWeights, Sampler], Drafter]


def load_drafter(
    config: Config, model: ResolvedModel, held_draft_model: HeldWeights | None = None
) -> MakeDrafter | None:
    """Loads what has weights of its own. Returns what makes the drafter, given the served model's weights and sampler.

    `held_draft_model`: as in `load_draft_model`.

    None: speculation is off. Raises `ModelError` or `ConfigError`, naming value and limit, and `CapacityError` if a GPU
    has no room; so does what it returns.
    """
    section = config.scheduler
    num_tokens, max_num_seqs = section.num_speculative_tokens, section.max_num_seqs
    if section.speculation == "off":
        return None
    if section.speculation == "medusa":
        heads = load_medusa_heads(section, model)
        return lambda weights, sampler: MedusaDrafter(DeviceHeads(heads, max_num_seqs), heads.num_heads)
    if section.speculation == "draft_model":
        draft_model = load_draft_model(section, config.model, model, held_draft_model)
        return lambda weights, sampler: ModelDrafter(
            DeviceDraftModel(draft_model, sampler, max_num_seqs), num_tokens, MAX_LATE_TOKENS
        )
    if section.speculation == "eagle3":
        head = load_eagle_head(section, model)

        def make_eagle(weights: ModelWeights, sampler: Sampler) -> Drafter:
            eagle = make_eagle_model(head, weights.embedding.table.data, section, model)
            on_device = DeviceEagle(eagle, sampler, max_num_seqs, section.max_num_batched_tokens)
            return ModelDrafter(on_device, num_tokens, max_late_tokens=None)

        return make_eagle
    if section.speculation == "ngram":
        return lambda weights, sampler: NgramDrafter(range(section.prompt_lookup_min, section.prompt_lookup_max + 1))
    history = AnswerHistory(SUFFIX_LENGTHS, section.suffix_cached_tokens)
    return lambda weights, sampler: NgramDrafter(SUFFIX_LENGTHS, history)


def make_drafting(section: SchedulerSection, drafter: Drafter | None) -> Drafting:
    """What decides when steps have this drafter's tokens; None: they have none."""
    if drafter is None:
        return Drafting()
    costs = StepCosts(section.max_num_seqs, section.max_num_batched_tokens)
    return MeasuredDrafting(drafter, section.num_speculative_tokens, costs)
