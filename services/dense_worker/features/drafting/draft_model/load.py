"""Loads a draft model, and refuses what cannot be one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from services.common.config import ModelSection, SchedulerSection
from services.common.errors import ConfigError, ModelError
from services.common.gpu import naming_what_needs_memory
from services.common.lifeline import Lifeline
from services.common.model_config import ModelConfig, load_model_config
from services.common.resolve import ResolvedModel
from services.dense_worker.features.drafting.draft_model.model import DraftModel
from services.dense_worker.features.drafting.kv_cache.draft_attention import bytes_of_block
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.model.weights import empty_weights, load_weights, random_weights, weights_hash

log = structlog.get_logger()

_FILE = "tokenizer.json"


def held_draft_model(
    section: SchedulerSection, source: ModelSection, model: ResolvedModel, lifeline: Lifeline
) -> HeldWeights[ModelWeights]:
    """The draft model's weights that the launcher has in memory, or will have. Raises `ModelError`."""
    path = section.draft_model
    assert path is not None, "the config has been checked"
    config = load_model_config(path)
    digest = weights_hash(path, config, source.dummy_seed if source.load_format == "dummy" else None)
    return HeldWeights(lifeline, digest, partial(empty_weights, config, model.dtype), model.device)


def load_draft_model(
    section: SchedulerSection,
    source: ModelSection,
    model: ResolvedModel,
    held: HeldWeights[ModelWeights] | None = None,
) -> DraftModel:
    """The model of `scheduler.draft_model`, in the dtype and on the device of the served one.

    `held`: its weights in the launcher's memory; None: there is no launcher.

    Raises `ModelError` for a model of another vocabulary or with parts that drafts do not support, `ConfigError` if
    `scheduler.draft_cache_bytes` is too small for it, and `CapacityError` if a GPU has no room for it. All name the
    value and the limit.
    """
    path = section.draft_model
    assert path is not None, "the config has been checked"
    config = load_model_config(path)
    check_vocabulary(path, config.vocab_size, source.path, model.config.vocab_size)
    if (lack := unsupported_part(config)) is not None:
        raise ModelError(f"the draft model {path} ({config.family}) has {lack}, which draft models may not have")
    max_len = min(model.max_model_len, config.max_position_embeddings)
    block_bytes = bytes_of_block(config, model.dtype)
    num_blocks = min(section.draft_cache_bytes // block_bytes, 1 + section.max_num_seqs * -(-max_len // BLOCK_SIZE))
    if num_blocks < 2:
        raise ConfigError(
            f"scheduler.draft_cache_bytes is {section.draft_cache_bytes}, the draft model {path} needs at least "
            f"{2 * block_bytes}, for two blocks of {BLOCK_SIZE} tokens"
        )

    def load(empty: Empty | None) -> ModelWeights:
        if source.load_format == "dummy":
            return random_weights(config, model.dtype, model.device, source.dummy_seed, empty)
        return load_weights(path, config, model.dtype, model.device, empty)

    with naming_what_needs_memory("the draft model"):
        weights = load(None) if held is None else held.get(load)
        draft = DraftModel(weights, config, num_blocks, max_len)
    num_tokens = (num_blocks - 1) * BLOCK_SIZE
    log.info("draft model loaded", path=str(path), max_len=max_len, num_cached_tokens=num_tokens)
    return draft


def unsupported_part(config: ModelConfig) -> str | None:
    """What the model has and `DraftModel` lacks; None: nothing."""
    if config.parts.experts is not None:
        return "a mixture of experts"
    if config.parts.latent is not None:
        return "latent attention"
    if config.quantization is not None:
        return f"quantized weights ({config.quantization.method})"
    if config.recurrent_layers:
        return "recurrent layers"
    if config.attention.layer_heads or config.parts.layer_inputs is not None:
        return "layers that differ in their heads or inputs"
    return "attention sinks" if config.attention.has_sinks else None


def check_vocabulary(draft: Path, draft_size: int, model: Path, model_size: int) -> None:
    """Raises `ModelError` if a token id means different texts to the models in the directories `draft` and `model`.

    It names both sizes and, if both have a tokenizer.json, the first token that differs. Special tokens may differ: to
    have other names for the same purpose is usual.
    """
    sizes = f"the draft model {draft} has a vocabulary of {draft_size} tokens, the model {model} one of {model_size}"
    difference = _first_difference(draft / _FILE, model / _FILE)
    if difference is not None:
        raise ModelError(f"{sizes}, and {difference}")
    if draft_size != model_size:
        raise ModelError(f"{sizes}; they must be the same")


def _first_difference(draft: Path, model: Path) -> str | None:
    """None: there is none, or one of the files is missing."""
    if not (draft.is_file() and model.is_file()):
        return None
    of_draft, of_model = _read(draft), _read(model)
    special = _special_ids(of_draft) & _special_ids(of_model)
    for token_id in range(max(of_draft.get_vocab_size(), of_model.get_vocab_size())):
        texts = of_draft.id_to_token(token_id), of_model.id_to_token(token_id)
        if texts[0] != texts[1] and token_id not in special:
            return f"token {token_id} is {texts[0]!r} there and {texts[1]!r} here"
    return None


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelError(f"{file} cannot be read: {error}") from error


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
