"""The features and row policies that a worker has: whoever adds one adds it here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from services.common.config import Config
from services.common.errors import ModelError
from services.common.families.shape import ModelConfig
from services.common.pooling.pooling_config import read_pooling
from services.common.resolve import ResolvedModel
from services.common.vision.vision_config import PixelScale, load_vision_config, why_blind
from services.dense_worker.backends import DenseBackend
from services.dense_worker.encoders.encoder_runs import EncoderRuns
from services.dense_worker.encoders.source.runnable_encoder import RunnableEncoder, SourceInput
from services.dense_worker.encoders.source.source_encoder import SourceEncoder
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.adapters.adapter_feature import AdapterFeature
from services.dense_worker.features.adapters.adapter_loader import make_loader
from services.dense_worker.features.beams.add_beams import prepare_beams
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.fork_policy import ForkPolicy, ParallelAnswers
from services.dense_worker.features.grammar.grammar_feature import GrammarFeature
from services.dense_worker.features.grammar.grammars import Grammars
from services.dense_worker.features.hidden_states.hidden_states_feature import HiddenStatesFeature
from services.dense_worker.features.images.images_feature import ImagesFeature
from services.dense_worker.features.images.prepare_images import PreparedImages, why_no_pictures
from services.dense_worker.features.pooling.pooling_feature import PoolingFeature
from services.dense_worker.features.pooling.pooling_head import (
    PoolingHead,
    load_pooling_head,
    random_pooling_head,
)
from services.dense_worker.features.prompt_embeds.embeds_loader import EmbedsLoader
from services.dense_worker.features.prompt_embeds.prompt_embeds_feature import PromptEmbedsFeature
from services.dense_worker.features.prompt_logprobs.prompt_logprobs_feature import PromptLogprobsFeature
from services.dense_worker.features.prompt_progress.progress_feature import ProgressFeature
from services.dense_worker.features.returned_logits.context_logits import ContextLogitsFeature
from services.dense_worker.features.returned_logits.generation_logits import GenerationLogitsFeature
from services.dense_worker.features.source.source_feature import NAME as SOURCE
from services.dense_worker.features.source.source_feature import SourceFeature
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.model.model_weights import ModelWeights
from services.pb import dense_pb2


def make_features(
    config: Config,
    model: ResolvedModel,
    weights: ModelWeights,
    backend: DenseBackend,
    lora: LoraStore | None,
    grammars: Grammars,
    images: PreparedImages | None,
) -> tuple[Feature, ...]:
    """All features, which the caller closes.

    lora: the adapters of the backend; None: they are off. images: the tower, which is loaded here; None: no pictures
    """
    loader = None if lora is None else make_loader(config, model, weights, lora)
    images_feature = _make_images(config, model, images)
    embeds = EmbedsLoader(model.dtype, model.config.embedding_size, backend.takes_input_embeds)
    return (
        AdapterFeature(config.dense.max_loras, loader, lora),
        PromptEmbedsFeature(embeds),
        images_feature,
        PromptLogprobsFeature(),
        ContextLogitsFeature(),
        GenerationLogitsFeature(),
        HiddenStatesFeature(),
        _make_pooling(config, model, weights),
        ProgressFeature(),
        GrammarFeature(grammars),
        SourceFeature(
            weights.encoder, model.config, images_feature.received, _make_encoder_runs(config, model, weights.encoder)
        ),
    )


def make_fork_policy(model: ModelConfig, num_lanes: int = 1) -> ForkPolicy:
    """Which sequences of a model are forked.

    With recurrent layers none: prompts have no states before their end. With several lanes neither: answers to one
    prompt may be in different ones.
    """
    return ForkPolicy() if model.recurrent_layers or num_lanes > 1 else ParallelAnswers()


def prepare_policy(sequence: Sequence, submit: dense_pb2.Submit, vocab_size: int) -> Awaitable[None] | None:
    """Gives a new sequence its row policy, before it joins the queue. None: it has none.

    Does not block the event loop. Awaited, it raises `InvalidRequest` if there is no such policy, and `PeerError` if
    the gateway would not read what it reports.
    """
    if sequence.spec.beam_search is None:
        return None
    return asyncio.to_thread(prepare_beams, sequence, submit, vocab_size)  # which may be millions of values


def has_progress(submit: dense_pb2.Submit) -> bool:
    """Whether a sequence is submitted again, with tokens or with what its row policy had found."""
    return bool(submit.output_token_ids or submit.search.beams)


def _make_pooling(config: Config, model: ResolvedModel, weights: ModelWeights) -> PoolingFeature:
    section, size, device = config.model, model.config.hidden_size, model.device
    pooling = read_pooling(section)
    if pooling is None:
        return PoolingFeature(None, PoolingHead())
    if section.load_format == "dummy":
        return PoolingFeature(pooling, random_pooling_head(pooling, size, device, section.dummy_seed))
    head = weights.head.lm_head.weight if model.rank.count == 1 else None  # other ranks may have no head
    table = head.matrix.data if isinstance(head, PlainWeight) else None  # [vocab, hidden]
    return PoolingFeature(pooling, load_pooling_head(pooling, section.path, size, device, table))


def _make_images(config: Config, model: ResolvedModel, images: PreparedImages | None) -> ImagesFeature:
    if images is not None:
        return images.load()
    return ImagesFeature(None, reason=why_no_pictures(config, model) or "no tower was prepared")


def _make_encoder_runs(
    config: Config, model: ResolvedModel, encoder: SourceEncoder | None
) -> EncoderRuns[SourceInput] | None:
    if encoder is None or model.config.encoder is None:
        return None
    pixels = None if model.config.encoder.swin is None else _pixel_scale(config)
    runnable, dense = RunnableEncoder(encoder, pixels, model.dtype, model.device), config.dense
    runnable.warm_up(model.config.encoder, dense.max_encoder_rows)
    return EncoderRuns(SOURCE, runnable, dense.max_encoder_rows, dense.encoder_cache_bytes)


def _pixel_scale(config: Config) -> PixelScale:
    """How the pixels of pictures become numbers that an encoder reads."""
    vision = load_vision_config(config.model.path)
    if vision is None:
        raise ModelError(why_blind(config.model.path))
    return vision.pixels
