"""Builds the dense worker's model: weights, backend, sampler and runner."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch

from services.channel.turns import Turns
from services.common.attention.learned import Learned
from services.common.config import Config, ModelSection, SchedulerSection
from services.common.errors import ConfigError
from services.common.gpu import naming_what_needs_memory
from services.common.kv_cache.format import KVCacheFormat, resolve_kv_cache_format
from services.common.lifeline import Lifeline
from services.common.model_config import ModelConfig
from services.common.rank import ALONE, Rank, seam_config
from services.common.resolve import ResolvedModel, resolve_model, use_device
from services.common.several_attention_workers import check_attention_workers
from services.common.several_lanes import check_lanes
from services.common.several_ranks import check_ranks
from services.common.split_context import check_split_context
from services.dense_worker.backends.select import PreparedBackend, SelectedBackend, prepare_backend
from services.dense_worker.encoders.source.runnable_encoder import example_input
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.features.drafting.drafter import Drafter
from services.dense_worker.features.drafting.load_drafter import PreparedDrafter, prepare_drafter
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.grammar.grammar_mask import GrammarMask
from services.dense_worker.features.grammar.grammars import Grammars
from services.dense_worker.features.images.prepare_images import PreparedImages, prepare_images, why_no_pictures
from services.dense_worker.features.installed import make_features
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear, RoutedExperts
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.kernels.lora.torch_lora import TorchLora
from services.dense_worker.metrics import ExpertLoads
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.learned import load_learned
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.on_the_fly import with_quantization
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.model.weights import empty_weights, hash_of_weights, load_weights, random_weights
from services.dense_worker.parameters import parts_of_type
from services.dense_worker.runner.lane_runners import LaneRunners, TurnModelRunner
from services.dense_worker.runner.model_runner import ModelRunner, StepRunner
from services.dense_worker.runner.stage_runner import StageModelRunner, StageSteps
from services.dense_worker.runner.step_hook import StepHook
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.sampler import Sampler, compile_kernels
from services.dense_worker.standby import weight_bytes
from services.dense_worker.tensorrt.profiles import Limits
from services.grammar.vocabulary import Vocabulary, read_vocabulary
from services.pb import dense_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run steps."""

    resolved: ResolvedModel
    weights_hash: str
    backend: str  # its name
    runner: StepRunner
    features: tuple[Feature, ...]  # of the runner
    drafter: Drafter | None  # None: speculation is off
    kv_cache_dtype: KVCacheFormat
    learned: Learned
    expert_loads: ExpertLoads | None  # None: no layer counts the tokens of experts
    gives_hidden_states: bool  # to clients that ask for them

    def describe(
        self, attachment: Attachment, epoch: int, scheduler: SchedulerSection, *, continues_sequences: bool
    ) -> dense_pb2.DenseInfo:
        """The description for gateways: the limits of the model, or of the KV cache if they are lower."""
        model, config = self.resolved, self.resolved.config
        return dense_pb2.DenseInfo(
            family=config.family,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            max_model_len=min(model.max_model_len, attachment.max_model_len),
            weights_hash=self.weights_hash,
            backend=self.backend,
            device=str(model.device),
            epoch=epoch,
            max_beam_width=min(scheduler.max_beam_width, scheduler.max_num_seqs),
            max_num_seqs=scheduler.max_num_seqs,
            hidden_size=config.hidden_size if self.gives_hidden_states else 0,
            continues_sequences=continues_sequences,
            rehearses=attachment.rehearses,
            num_example_rows=0 if config.encoder is None else example_input(config.encoder, 1).num_rows,
        )


def resolve_dense_model(config: Config, rank: Rank = ALONE, shape: ModelConfig | None = None) -> ResolvedModel:
    """The model as the dense worker runs it: with the quantization of its checkpoint, or the one that is made here.

    `shape`: what config.json says; None: it is read here.
    Raises `ModelError` or `ConfigError`, naming value and limit, also for what several ranks cannot do.
    """
    model = replace(resolve_model(config.model, config.dense.device, config.attention, shape), rank=rank)
    check_ranks(config, model.config)
    check_attention_workers(config, model.config)
    check_lanes(config, model.config)
    check_split_context(config, model, is_dense=True)
    speculation = config.scheduler.speculation
    if speculation != "off" and model.config.recurrent_layers:
        raise ConfigError(
            f"scheduler.speculation is {speculation!r}, but rejected drafts cannot be taken out of the states of "
            f"recurrent layers, as {model.config.family!r} has: set it to off"
        )
    if model.config.encoder is not None:
        check_encoder(config, model.config)
    return replace(model, config=with_quantization(model.config, config.dense.quantization, config.model.path))


def check_encoder(config: Config, model: ModelConfig) -> None:
    """Raises `ConfigError`, naming value and what to do, for what does not go together with an encoder."""
    for setting, value, allowed in (
        ("scheduler.speculation", config.scheduler.speculation, "off"),
        ("dense.max_loras", config.dense.max_loras, 0),
        ("dense.quantization", config.dense.quantization, "checkpoint"),
        ("gateway.enable_prompt_embeds", config.gateway.enable_prompt_embeds, False),
    ):
        if value != allowed:
            raise ConfigError(
                f"{setting} is {value!r}, which does not go together with the encoder of {model.family!r}: set it to"
                f" {allowed}"
            )
    if model.quantization is not None:
        raise ConfigError(
            f"the checkpoint is quantized ({model.quantization.method}), which is not supported for {model.family!r}"
        )


def load_model(
    config: Config, model: ResolvedModel, report: Callable[[str], None], lifeline: Lifeline | None = None
) -> LoadedModel:
    """Loads a model; takes minutes for a large one. `report` receives lines about its progress.

    `lifeline`: to the launcher, which may have the weights in memory.

    Raises `ModelError` for missing or damaged weights or scales of the KV cache, and `CapacityError` if a GPU has no
    room for the weights or for a step.
    """
    return prepare_model(config, model, report, lifeline).load()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model without its weights: whatever can be ready before they are in memory."""

    config: Config
    resolved: ResolvedModel
    grammars: Grammars
    backend: PreparedBackend
    digest: str  # of the weights
    lifeline: Lifeline | None  # to the launcher; None: there is none
    held: HeldWeights[ModelWeights] | None  # the weights that the launcher has, or will have
    report: Callable[[str], None]  # as in `load_model`
    drafter: PreparedDrafter | None  # None: speculation is off
    images: PreparedImages | None  # None: the model sees no pictures

    def own_weight_bytes(self) -> int:
        """The size of the weights that the launcher does not have in memory. Raises `PeerError`."""
        num_bytes = weight_bytes(self.resolved) if self.held is None else 0
        if self.images is not None and self.images.held is None:
            num_bytes += self.images.num_bytes
        return num_bytes + sum(each.num_bytes for each in self._all_held() if not each.are_held())

    def read_ahead(self) -> None:
        """Does already what features do when the model is loaded."""
        self.grammars.begin()

    def _all_held(self) -> list[HeldWeights[Any]]:
        return [
            each
            for each in (self.held, self.drafter and self.drafter.held, self.images and self.images.held)
            if each is not None
        ]

    def load(self, *, takes_over: bool = False) -> LoadedModel:
        """Loads the weights. Raises the errors of `load_model`.

        With `takes_over` another dense worker serves now. Whatever needs no attachment is prepared here. Ranks and
        lanes capture CUDA graphs, which need one, when a step first needs them: otherwise all streams would wait for
        all graphs.
        """
        config, model = self.config, self.resolved
        use_device(model.device, config.dense.num_threads)  # of the calling thread
        section, scheduler = config.model, config.scheduler
        kv_cache_dtype = resolve_kv_cache_format(config.attention, model)
        learned = load_learned(config, model, kv_cache_dtype)
        make_drafter = self.drafter and self.drafter.load()
        weights = load_model_weights(section, model, self.held, self.report)
        if self.lifeline is not None:
            self.lifeline.keep([each.key for each in self._all_held()], model.rank.prefix)
        if model.config.quantization is not None:
            log_formats(model.config.quantization.method, weights)
        lora = make_lora(config, model, weights)
        with naming_what_needs_memory("the buffers of a step"):
            selected = self.backend.load(weights, lora)
            features = make_features(config, model, weights, selected.backend, lora, self.grammars, self.images)
            sampler = self._make_sampler(selected, features)
            drafter = make_drafter and make_drafter(weights, sampler)
            if scheduler.num_lanes == 1:
                runner = self._make_runner(selected, sampler, features, drafter and drafter.on_device, takes_over)
            else:
                backends = [selected, *(self.backend.load(weights, lora) for _ in range(1, scheduler.num_lanes))]
                runner = self._make_lanes(backends, features, takes_over)
        experts = make_expert_loads(weights)
        return LoadedModel(
            model,
            self.digest,
            selected.name,
            runner,
            features,
            drafter,
            kv_cache_dtype,
            learned,
            experts,
            selected.backend.gives_hidden_states,
        )

    def _make_sampler(self, selected: SelectedBackend, features: tuple[Feature, ...]) -> Sampler:
        model, editors = self.resolved, (*EDITORS, *(editor for feature in features for editor in feature.editors))
        sizes = self.config.scheduler.max_num_seqs, model.config.vocab_size
        return Sampler(*sizes, model.device, editors, selected.backend.logits_dtype)

    def _make_lanes(
        self, backends: SequenceOf[SelectedBackend], features: tuple[Feature, ...], takes_over: bool
    ) -> LaneRunners:
        """backends: one for each lane"""
        model, parts = self.resolved, [(each, self._make_sampler(each, features)) for each in backends]
        if model.device.type != "cpu":
            return LaneRunners([self._make_runner(*each, features, None, takes_over) for each in parts])
        sizes = len(model.rank.layers(model.config.num_layers)), self.config.scheduler.max_num_seqs
        if model.rank.is_stage:
            steps = StageSteps()
            return LaneRunners(
                [StageModelRunner(steps, each.backend, sampler, *sizes, features) for each, sampler in parts]
            )
        turns = Turns()
        return LaneRunners([TurnModelRunner(turns, each.backend, sampler, *sizes, features) for each, sampler in parts])

    def _make_runner(
        self,
        selected: SelectedBackend,
        sampler: Sampler,
        features: tuple[Feature, ...],
        hook: StepHook | None,
        takes_over: bool,
    ) -> ModelRunner:
        config, model, scheduler = self.config, self.resolved, self.config.scheduler
        num_layers = len(model.rank.layers(model.config.num_layers))
        if model.device.type == "cpu":
            return ModelRunner(selected.backend, sampler, num_layers, scheduler.max_num_seqs, features, hook)
        from services.dense_worker.runner.cuda_model_runner import CudaModelRunner

        has_others = model.rank.count > 1 or scheduler.num_lanes > 1
        cuda_runner = CudaModelRunner(
            selected.backend,
            sampler,
            seam_config(model.config, model.rank),
            model.dtype,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            captures_lazily=config.dense.captures_lazily or (takes_over and has_others),
            logits_dtype=selected.backend.logits_dtype,
            features=features,
            hook=hook,
            num_lanes=scheduler.num_lanes,
            before_capture=selected.before_capture,
        )
        if takes_over:
            cuda_runner.warm_up()
        return cuda_runner


def prepare_model(
    config: Config, model: ResolvedModel, report: Callable[[str], None], lifeline: Lifeline | None = None
) -> PreparedModel:
    """Prepares what needs no weights: the device's context, the vocabulary of grammars, and the backend.

    `report` and `lifeline` as in `load_model`. Raises the errors of `prepare_backend`.
    """
    use_device(model.device, config.dense.num_threads)  # of the calling thread
    if model.device.type != "cpu":
        torch.zeros(1, device=model.device)  # makes the context
        # With Triton, and before the thread below, which forks: what is being imported at a fork can never be imported
        # in the forked process, and two threads that import parts of Triton have ended a start.
        import services.dense_worker.backends.cuda_backend
        import services.dense_worker.runner.cuda_model_runner  # noqa: F401

        # Meanwhile, because it takes seconds if Triton has them not in its cache. What fails there fails again later.
        threading.Thread(target=_compile_sampling, args=(model,), name="compile-sampling", daemon=True).start()
    section, scheduler = config.model, config.scheduler
    grammars = Grammars(lambda: _read_vocabulary(section, model))
    limits = Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    heads_of = None if scheduler.speculation_model is None else scheduler.speculation
    sees_pictures = why_no_pictures(config, model) is None
    backend = prepare_backend(config.dense, section, model, limits, report, heads=heads_of, takes_vectors=sees_pictures)
    digest = hash_of_weights(section, model.config)
    held = hold_weights(lifeline, digest, model)
    drafter = prepare_drafter(config, model, lifeline)
    images = prepare_images(config, model, digest, lifeline, backend.tensorrt, report)
    return PreparedModel(config, model, grammars, backend, digest, lifeline, held, report, drafter, images)


def _compile_sampling(model: ResolvedModel) -> None:
    with contextlib.suppress(RuntimeError):  # includes torch.OutOfMemoryError
        compile_kernels(model.config.vocab_size, model.device, {torch.float32, model.dtype}, (GrammarMask,))


def make_expert_loads(weights: ModelWeights) -> ExpertLoads | None:
    """The counts of the layers that count the tokens of experts; None if there are no such layers."""
    layers = {i: next(parts_of_type(RoutedExperts, layer), None) for i, layer in enumerate(weights.layers)}
    counts = {i: routed.loads for i, routed in layers.items() if routed is not None and routed.loads is not None}
    return ExpertLoads(counts) if counts else None


def with_stated_hash(model: LoadedModel, stated: str | None) -> LoadedModel:
    """The model under another weights' hash, if one is stated: keys and values of those weights are kept."""
    if stated is None or stated == model.weights_hash:
        return model
    log.warning("the KV cache of other weights is kept", own_hash=model.weights_hash, stated_hash=stated)
    return replace(model, weights_hash=stated)


def log_formats(method: str, weights: ModelWeights) -> None:
    """Logs the formats of all linear layers. On a GPU the backend logs what multiplies them, see `CudaLinear`."""
    linears = (*parts_of_type(Linear, weights), *parts_of_type(ExpertLinear, weights))
    formats = Counter(type(linear.weight).__name__ for linear in linears)
    multiplied_by = "reference in torch" if weights.device.type == "cpu" else "kernels by layer"
    log.info("weights are quantized", method=method, multiplied_by=multiplied_by, **formats)


def hold_weights(lifeline: Lifeline | None, digest: str, model: ResolvedModel) -> HeldWeights[ModelWeights] | None:
    """The weights that the launcher has, or will have; None without a launcher."""
    if lifeline is None:
        return None

    def make_empty(device: torch.device, empty: Empty) -> ModelWeights:
        return empty_weights(model.config, model.dtype, device, empty, model.rank)

    return HeldWeights(lifeline, digest, make_empty, model.device, model.rank)


def load_model_weights(
    section: ModelSection,
    model: ResolvedModel,
    held: HeldWeights[ModelWeights] | None,
    report: Callable[[str], None],
) -> ModelWeights:
    """The weights, of one rank if there are several; those that are held, if they are. `report` as in `load_weights`.
    """

    def load(empty: Empty | None) -> ModelWeights:
        if section.load_format == "dummy":
            return random_weights(model.config, model.dtype, model.device, section.dummy_seed, empty, model.rank)
        return load_weights(section.path, model.config, model.dtype, model.device, empty, model.rank, report)

    with naming_what_needs_memory("the weights"):
        return load(None) if held is None else held.get(load)


def _read_vocabulary(section: ModelSection, model: ResolvedModel) -> Vocabulary:
    config, is_dummy = model.config, section.load_format == "dummy"
    return read_vocabulary(section.path, config.vocab_size, config.eos_token_ids, is_optional=is_dummy)


def make_lora(config: Config, model: ResolvedModel, weights: ModelWeights) -> LoraStore | None:
    """Empty slots for adapters on the model's device; None if `dense.max_loras` is 0."""
    section = config.dense
    if not section.max_loras:
        return None
    linears = list(parts_of_type(Linear, weights.layers))
    if model.device.type == "cpu":
        row_by_row = section.deterministic
        return TorchLora(linears, section.max_loras, model.dtype, model.device, row_by_row=row_by_row)
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora  # needs triton

    max_num_tokens = config.scheduler.max_num_batched_tokens
    with naming_what_needs_memory("dense.max_loras adapters of dense.max_lora_rank"):
        return CudaLora(
            linears,
            section.max_loras,
            section.max_lora_rank,
            max_num_tokens,
            model.dtype,
            model.device,
            is_deterministic=section.deterministic,
        )
