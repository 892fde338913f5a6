"""`CudaModelRunner`: the dense worker's steps on a GPU, each enqueued while the previous one runs.

Steps are captured CUDA graphs, one per number of tokens, handoffs included: up to a few hundred tokens, launching a
step kernel by kernel takes longer than running it. The token of a sequence stays on the device as the input of its
next step; the host reads it from pinned memory after an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
import structlog
import torch

from services.channel import Channel
from services.common.batch_buckets import SHORT_STEP_TOKENS, bucket_for, token_buckets
from services.common.cuda_graphs import StepGraphs
from services.common.engine_thread import end_waits_in_time
from services.common.errors import CapacityError
from services.common.model_config import ModelConfig
from services.dense_worker.backends import CapturedEmbeds, DenseBackend, GivenEmbeds, InputEmbeds
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.step_part import StepPart
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.runner.model_runner import LayerRun, ModelRunner, RunningStep
from services.dense_worker.runner.step_hook import FollowUp, StepHook
from services.dense_worker.runner.step_input import StepInput
from services.dense_worker.runner.step_tokens import PendingTokens
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.upload import upload
from services.step import NO_ROWS, StepPlan, StepResult

log = structlog.get_logger()

_NUM_STAGES = 3  # pinned buffers, used in turn: one is being filled, up to two may have pending copies
FEW_SAMPLED = 16  # rows
_ROWS_WITH_VECTORS = 128  # of which longer graphs with vectors have a multiple: what tiles of products have


class _Size(NamedTuple):
    """What the graph of a step depends on."""

    num_rows: int
    num_sampled: int
    active: frozenset[Feature]  # those with kernels of their own of which the step has rows
    num_hidden: int | None = None  # rows whose hidden states a step without output gives; None: it samples instead
    has_vectors: bool = False  # in place of embeddings


class CudaModelRunner(ModelRunner):
    """A `ModelRunner` for a GPU. Graphs belong to one attachment, whose addresses they hold."""

    def __init__(
        self,
        backend: DenseBackend,
        sampler: Sampler,
        config: ModelConfig,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_tokens: int,
        *,
        captures_lazily: bool,
        logits_dtype: torch.dtype = torch.float32,
        features: Iterable[Feature] = (),
        hook: StepHook | None = None,
        num_lanes: int = 1,
        before_capture: Callable[[int], None] | None = None,
    ) -> None:
        """`num_lanes`: to which `max_num_seqs` sequences are dealt, of which this runner has those of one lane.

        `before_capture` is called for each number of rows before its first graph is captured, and may measure kernels.
        """
        super().__init__(backend, sampler, config.num_layers, max_num_seqs, features, hook)
        self._num_kinds = config.num_middle_kinds
        self._buckets = token_buckets(max_num_seqs, max_num_tokens)
        self._usual_sampled = max_num_seqs * 9 // (8 * num_lanes)  # lanes may differ somewhat
        self._stream = torch.cuda.Stream()
        self._dtype, self._seam_sizes = dtype, (config.qkv_size, config.attn_size)
        self._captures_lazily, self._num_lanes = captures_lazily, num_lanes
        self._before_capture = before_capture
        self._has_ranks = False
        self._undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext  # of captures, by other ranks' ends
        self._without_graph = set[_Size]()  # since memory had no room
        self._graphs: dict[Channel, StepGraphs[_Size]] = {}
        # One step's input, packed so that one copy moves it; see `_unpack`.
        self._input = torch.zeros(3 * max_num_tokens, dtype=torch.int64, device="cuda")
        self._sent = np.empty(0, np.int64)  # what it holds
        self._stages = [torch.zeros(3 * max_num_tokens, dtype=torch.int64, pin_memory=True) for _ in range(_NUM_STAGES)]
        # All graphs write their logits here, so that they can share all other memory.
        self._logits = torch.empty(max_num_seqs, config.vocab_size, dtype=logits_dtype, device="cuda")
        self._outputs = [torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=True) for _ in range(_NUM_STAGES)]
        features = tuple(features)
        # Of steps without output.
        self._max_hidden = max((each.max_hidden_rows(max_num_seqs, max_num_tokens) for each in features), default=0)
        if self._max_hidden and not backend.skips_logits:
            self._max_hidden = 0
        self._hidden_buckets = list[int]()
        if self._max_hidden:
            self._hidden_buckets = token_buckets(max_num_seqs, max_num_tokens, max_num_tokens)
            self._hidden_rows = torch.zeros(self._max_hidden, dtype=torch.int64, device="cuda")
            self._hidden = torch.empty(self._max_hidden, config.hidden_size, dtype=dtype, device="cuda")
        self._vectors: _StepVectors | None = None  # None: steps with some are not captured
        if any(each.gives_vectors for each in features) and backend.captures_embeds:
            self._vectors = _StepVectors(self._buckets[-1], config.embedding_size, dtype)
        self._num_launched = 0
        self._unsampled: _Launched | None = None  # a step that waits for tokens of the step before
        self._sampleable: _Launched | None = None  # it, once the step before has been collected
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._hook.warm_up()  # now, because the KV cache will take the memory that is free

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs each segment for all captured sizes, without a channel: kernels are compiled, libraries choose theirs.

        Waits for the device. Afterwards capturing a graph takes milliseconds.
        """
        with torch.cuda.stream(self._stream):
            for num_rows in reversed(self._buckets):
                self._prepare(num_rows)
                qkv, attn_out = (
                    torch.zeros(num_rows, size, dtype=self._dtype, device="cuda") for size in self._seam_sizes
                )
                for size in self._sizes([num_rows]):
                    with self._activated(size.active):
                        self._run_segments(qkv, attn_out, attn_out, size.num_sampled)
            self._stream.synchronize()

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None:
        """Leaves the graphs to `capture_ahead`, unless `captures_lazily` is on.

        With other ranks, which would have to capture at the same time, and with other lanes, for whose steps a capture
        would wait, the first attachment captures them now and later ones when steps need them: streams wait for these.
        """
        torch.cuda.set_device(self._stream.device)  # for the engine thread, which would otherwise use the first GPU
        end_waits_in_time()  # of that thread, which looks every few microseconds whether a step has ended
        super().attach(channels, ranks)
        self._unsampled = self._sampleable = None
        self._graphs.clear()  # frees their memory before the new graphs need it
        self._without_graph.clear()
        self._has_ranks = ranks is not None
        self._undisturbed = nullcontext if ranks is None else ranks.group.capturing
        has_others = self._has_ranks or self._num_lanes > 1
        for channel in channels:
            self._graphs[channel] = graphs = self._make_graphs(channel)
            if self._captures_lazily:
                continue
            sizes = self._sizes(reversed(self._buckets))
            if has_others:
                graphs.capture_all(sizes)
            else:
                graphs.capture_later(sizes)
        self._captures_lazily |= has_others

    def capture_ahead(self) -> bool:
        """Captures one graph."""
        return any(graphs.capture_next() for graphs in self._graphs.values())

    def _make_graphs(self, channel: Channel) -> StepGraphs[_Size]:
        def run(size: _Size) -> None:
            with self._activated(size.active):
                vectors = self._vectors.of_step(size.num_rows) if size.has_vectors and self._vectors else None
                logits, residual = self._run_rows(channel, size.num_rows, size.num_sampled, vectors)
                if size.num_hidden is None:
                    self._logits[: size.num_sampled] = logits
                else:
                    self._find_hidden(channel.attn_out[: size.num_rows], residual, size.num_hidden)

        def warm_up(size: _Size) -> None:
            self._prepare(size.num_rows)
            with self._activated(size.active):
                self._warm_up(channel, size)

        return StepGraphs(self._stream, warm_up, run, undisturbed=self._undisturbed)

    def _prepare(self, num_rows: int) -> None:
        if self._before_capture is not None:
            self._before_capture(num_rows)

    def _sizes(self, buckets: Iterable[int]) -> list[_Size]:
        """The graphs of these numbers of rows: plain steps pay nothing for those with features' kernels."""
        num_features = range(len(self._with_kernels) + 1)
        kinds = [frozenset(each) for num in num_features for each in combinations(self._with_kernels, num)]
        return [
            _Size(rows, sampled, active)
            for rows in buckets
            for sampled in self._sampled_sizes(rows)
            for active in kinds
        ]

    @contextmanager
    def _activated(self, active: frozenset[Feature]) -> Iterator[None]:
        """A context in which steps run the kernels of these features, and of no others."""
        with ExitStack() as stack:
            for feature in self._with_kernels:
                stack.enter_context(feature.activated(feature in active))
            yield

    @torch.inference_mode()
    def launch(self, plan: StepPlan, channel: Channel) -> RunningStep:
        """Enqueues the whole step; waits for the device only to capture a graph.

        If a feature needs tokens of the step before, sampling is enqueued later, see `sample_next`.
        """
        self.sample_next()  # before this step's layers, and while the slots of sequences that it closes are valid
        assert self._unsampled is None, "at most one step is launched ahead"
        stage = self._num_launched % _NUM_STAGES
        self._num_launched += 1
        with torch.cuda.stream(self._stream):
            step = self.prepare(self.bind(plan))
            sample = self._enqueue(step, channel, stage) if plan.entries else None
        launched = _Launched(self, channel, sample, step.parts.values())
        if step.waits_for_tokens:
            self._unsampled = launched
        else:
            self._finish(launched)
        return launched

    @torch.inference_mode()
    def sample_next(self) -> None:
        """Enqueues the sampling of a step that had to wait for the tokens of the one before, if they are known now.

        Editors may take the host some milliseconds to find their masks, while the device runs the step's layers.
        Where that is not over, this is not called before it must be: so the attention worker gets the plan of the
        next step first, and the gateways get the tokens of the step before.
        """
        launched, self._sampleable = self._sampleable, None
        if launched is not None:
            self._finish(launched)

    def sample_if_ready(self) -> None:
        """The same if editors need not wait."""
        if self._sampleable is not None and self._sampleable.is_ready:
            self.sample_next()

    def note_collected(self) -> None:
        """The oldest step in flight has been collected: the one after it can be sampled."""
        if self._unsampled is not None:
            self._sampleable, self._unsampled = self._unsampled, None

    @torch.inference_mode()
    def add_follow_up(self, launched: _Launched, follow_up: FollowUp) -> None:
        """Enqueues what follows the newest step."""
        self.sample_next()
        with torch.cuda.stream(self._stream):
            launched.enqueue(follow_up)

    def _finish(self, launched: _Launched) -> None:
        with torch.cuda.stream(self._stream):
            launched.finish()

    def _enqueue(self, step: StepInput, channel: Channel, stage: int) -> Callable[[], PendingTokens]:
        """Enqueues all layers; returns what enqueues the sampling."""
        num_tokens, num_sampled = len(step.token_ids), len(step.sampled_rows)
        size = self._captured_size(step)
        if size in self._without_graph:
            size = None
        graph = None
        if size is not None:
            try:
                graph = self._graphs[channel].find(size)
            except CapacityError as error:
                if self._has_ranks and not size.has_vectors:  # the others have the graph
                    raise
                log.warning("no room for the graph of a step", size=str(size), reason=str(error))
                self._without_graph.add(size)
                size = None
        num_rows, num_logits = (num_tokens, num_sampled) if size is None else (size.num_rows, size.num_sampled)
        packed = self._stages[stage].numpy()[: 3 * num_rows]
        token_ids, fed_slots, sampled_rows = packed.reshape(3, num_rows)
        token_ids[:num_tokens] = step.token_ids
        token_ids[num_tokens:] = 0  # padding: any valid token and row
        fed_slots[:] = -1  # behind the last slot
        if len(step.fed_rows):
            token_ids[step.fed_rows] = 0
            fed_slots[step.fed_rows] = step.fed_slots
        sampled_rows[:num_sampled] = step.sampled_rows
        sampled_rows[num_sampled:] = 0
        if not np.array_equal(packed, self._sent):  # a step of the same sequences that decode often has the same
            # Both sides are contiguous and the host's memory is pinned, so the copy is asynchronous.
            self._input[: 3 * num_rows].copy_(self._stages[stage][: 3 * num_rows], non_blocking=True)
            self._sent = packed.copy()
        if size is not None and size.num_hidden is not None:
            rows = np.zeros(size.num_hidden, np.int64)  # padding: any valid row
            if step.hidden_rows is not None:
                rows[: len(step.hidden_rows)] = step.hidden_rows
            self._hidden_rows[: size.num_hidden].copy_(upload(rows, self._input.device))
        self._begin_step(step, channel, num_rows, num_logits)
        hidden, embeds = None, None if step.input_embeds is None else step.input_embeds.upload(self._input.device)
        if graph is not None:
            if embeds is not None and self._vectors is not None:
                self._vectors.write(embeds, num_rows)
            graph.replay()
            logits, residual = self._logits, None
            hidden = None if size is None or size.num_hidden is None else self._hidden
        else:
            logits, residual = self._run_rows(channel, num_rows, num_sampled, embeds, step.layer_readers)
        outputs = self._outputs[stage][:num_sampled]
        return lambda: self.finish(step, logits[:num_sampled], residual, channel, outputs, hidden)

    def _captured_size(self, step: StepInput) -> _Size | None:
        """The size of the step's graph; None: it has none.

        Further rows need another call of the backend, but a graph's residual is in memory that graphs share. And what
        parts take of layers, or add behind them, is in no graph.
        """
        num_tokens = len(step.token_ids)
        if step.needs_residual or step.layer_readers:
            return None
        active = frozenset([feature for feature in self._with_kernels if feature in step.parts])
        if step.input_embeds is not None:
            return self._size_with_vectors(step, active)
        num_hidden = 0 if step.hidden_rows is None else len(step.hidden_rows)
        if not step.has_output and num_hidden <= self._max_hidden:
            num_rows = bucket_for(self._hidden_buckets, num_tokens)
            return _Size(num_rows, 0, active, min(num_rows, self._max_hidden))
        if num_hidden or num_tokens > self._buckets[-1]:
            return None
        num_rows = bucket_for(self._buckets, num_tokens)
        return _Size(num_rows, bucket_for(self._sampled_sizes(num_rows), len(step.sampled_rows)), active)

    def _size_with_vectors(self, step: StepInput, active: frozenset[Feature]) -> _Size | None:
        """The same for a step with vectors. Its graphs have few sizes, since each is captured when a step needs it."""
        num_tokens, embeds = len(step.token_ids), step.input_embeds
        is_plain = embeds is not None and embeds.deep is None and step.has_output and step.hidden_rows is None
        if self._vectors is None or not is_plain or num_tokens > self._buckets[-1]:
            return None
        num_rows = min(rows_with_vectors(num_tokens), self._buckets[-1])
        num_sampled = bucket_for(self._sampled_sizes(num_rows), len(step.sampled_rows))
        return _Size(num_rows, num_sampled, active, has_vectors=True)

    def _find_hidden(self, attn_out: torch.Tensor, residual: torch.Tensor, num_hidden: int) -> None:
        """Computes the hidden states of so many of the step's rows, all of which a graph reads and writes in place."""
        self._backend.hidden(attn_out, residual, self._hidden_rows[:num_hidden], self._hidden[:num_hidden])

    def _run_rows(
        self,
        channel: Channel,
        num_rows: int,
        num_sampled: int,
        input_embeds: GivenEmbeds | None,
        readers: SequenceOf[StepPart] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all layers for `num_rows` tokens; returns logits [num_sampled, vocab_size] and the residual."""
        token_ids, fed_slots, sampled_rows = _unpack(self._input, num_rows)
        token_ids = self._sampler.feed(token_ids, fed_slots)
        layers = LayerRun(self._backend, channel, self._num_layers, self._hook.residuals_out(), readers)
        layers.begin(token_ids, input_embeds)
        return layers.finish(sampled_rows[:num_sampled], self._hook.hidden_out(num_sampled))

    def _sampled_sizes(self, num_rows: int) -> list[int]:
        """Numbers of sampled rows to capture: steps with prompts sample few tokens, decode steps one per row.

        With prompts of other sequences a lane samples about its part of all.
        """
        most = min(num_rows, self._max_num_seqs)
        return sorted({min(most, FEW_SAMPLED), min(most, self._usual_sampled), most})

    def _warm_up(self, channel: Channel, size: _Size) -> None:
        """Runs the segments without handoffs, so that kernels are compiled and libraries choose theirs."""
        qkv, attn_out = channel.qkv[: size.num_rows], channel.attn_out[: size.num_rows]
        attn_out.zero_()
        fetched = channel.fetch_attn_out(size.num_rows)
        self._run_segments(qkv, attn_out, fetched, size.num_sampled, size.num_hidden)

    def _run_segments(
        self,
        qkv: torch.Tensor,
        attn_out: torch.Tensor,
        fetched: torch.Tensor,
        num_sampled: int,
        num_hidden: int | None = None,
    ) -> None:
        """Runs each segment once. `fetched` is what `middle` gets of attn_out."""
        self._backend.begin_step(StepPlan(0), len(qkv), num_sampled)  # all rows are padding
        self._sent = self._sent[:0]
        self._input.zero_()  # it may hold packed input of an earlier attachment's steps, which are not valid token ids
        token_ids, _, sampled_rows = _unpack(self._input, len(qkv))
        residual = self._backend.first(token_ids, qkv)
        for layer in range(min(self._num_kinds, self._num_layers - 1)):
            residual = self._backend.middle(layer, fetched, residual, qkv)
        if (residuals_out := self._hook.residuals_out()) is not None:
            residuals_out.put(residuals_out.layers[0], residual)
        if num_hidden is None:
            self._backend.last(attn_out, residual, sampled_rows[:num_sampled], self._hook.hidden_out(num_sampled))
        else:
            self._hidden_rows.zero_()
            self._find_hidden(attn_out, residual, num_hidden)


def rows_with_vectors(num_tokens: int) -> int:
    """How many rows the graph of a step with vectors has. A short one must stay short: it has another flag."""
    if num_tokens <= SHORT_STEP_TOKENS:
        return SHORT_STEP_TOKENS
    return -(-num_tokens // _ROWS_WITH_VECTORS) * _ROWS_WITH_VECTORS


def _unpack(packed: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views, int64 [num_rows] each: token ids or 0, the slot that each token comes from (or -1), and rows to sample."""
    token_ids, fed_slots, sampled_rows = packed[: 3 * num_rows].view(3, num_rows)
    return token_ids, fed_slots, sampled_rows


class _StepVectors:
    """Vectors in place of embeddings, for any rows of a captured step. All graphs read the same memory."""

    def __init__(self, max_rows: int, size: int, dtype: torch.dtype) -> None:
        """size: numbers of a vector"""
        self._is_given = torch.zeros(max_rows, 1, dtype=torch.bool, device="cuda")
        self._vectors = torch.zeros(max_rows, size, dtype=dtype, device="cuda")

    def of_step(self, num_rows: int) -> CapturedEmbeds:
        """What a graph of so many rows reads."""
        return CapturedEmbeds(self._is_given[:num_rows], self._vectors[:num_rows])

    def write(self, embeds: InputEmbeds, num_rows: int) -> None:
        """Enqueues the vectors of the next step, which are on the device."""
        is_given, vectors = self.of_step(num_rows)
        vectors.index_copy_(0, embeds.rows, embeds.vectors)
        is_given.zero_().index_fill_(0, embeds.rows, True)


class _Launched(RunningStep):
    """A step whose layers are enqueued; `sample` enqueues the rest of it. None: it has no entries."""

    runs_when_collected = False

    def __init__(
        self,
        runner: CudaModelRunner,
        channel: Channel,
        sample: Callable[[], PendingTokens] | None,
        parts: Collection[StepPart],
    ) -> None:
        self._runner = runner
        self._channel = channel
        self._sample, self._parts = sample, parts
        self._tokens: PendingTokens | None = None
        self._event: torch.cuda.Event | None = None  # the end of the whole step
        self._sampled_event: torch.cuda.Event | None = None  # where its follow-up begins; None: it has none

    def finish(self) -> None:
        """Enqueues what is left of the step, on the current stream."""
        if self._sample is not None:
            self._tokens, self._sample = self._sample(), None
        self._event = torch.cuda.Event()
        self._event.record()

    def follow_with(self, follow_up: FollowUp) -> None:
        self._runner.add_follow_up(self, follow_up)

    def enqueue(self, follow_up: FollowUp) -> None:
        """Enqueues what follows the step on the current stream. The step has been sampled."""
        assert self._sample is None, "the step before has been collected"
        if self._tokens is not None:
            self._sampled_event = torch.cuda.Event(enable_timing=True)
            self._sampled_event.record()
            self._tokens = self._runner.follow(self._tokens, follow_up)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether editors have found what they need to sample it."""
        return all(part.is_ready for part in self._parts)

    def is_done(self) -> bool:
        return self._event is not None and self._event.query()

    def sample(self, *, waits: bool) -> None:
        if self._event is None:  # no further step has been launched
            (self._runner.sample_next if waits else self._runner.sample_if_ready)()

    def collect(self) -> StepResult:
        self._channel.check()
        result = self._tokens.read() if self._tokens is not None else StepResult(NO_ROWS)
        if self._sampled_event is not None and self._event is not None:
            result = replace(result, follow_up_s=self._sampled_event.elapsed_time(self._event) * 1e-3)
        self._runner.note_collected()
        return result
