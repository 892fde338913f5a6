"""`ModelRunner`: runs the dense strokes of a plan and turns logits into tokens.

It runs on the engine thread and sees only plans: it keeps what a plan says about each sequence, and its tokens. A
running sequence has a *slot*: its row in the sampler's state, where its last token stays on the device as the input of
its next step, and its row of `BatchRows`, by which a step handles all its sequences at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import torch

from services.channel import Channel, Flag, qkv_flag
from services.dense_worker.backends import DenseBackend, GivenEmbeds, InputEmbeds
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.step_part import FurtherRows, StepPart, StepView
from services.dense_worker.ranks.leading_backend import LeadingBackend, LeadingRanks
from services.dense_worker.runner.batch_rows import BatchRows, RequestState
from services.dense_worker.runner.step_hook import FollowUp, KeptResiduals, StepHook
from services.dense_worker.runner.step_input import Batch, BoundPlan, SampledRows, StepInput
from services.dense_worker.runner.step_tokens import PendingTokens
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.upload import upload
from services.step import NO_ROWS, PlanEntry, StepPlan, StepResult


class RunningStep:
    """A step that has been launched; some of those that run when they are collected can run parts before."""

    runs_when_collected: ClassVar[bool] = True  # on the thread that calls `collect`; otherwise on a device, at once

    def is_done(self) -> bool:
        """Whether `collect` would return without waiting."""
        return True

    def sample(self, *, waits: bool) -> None:
        """Enqueues the sampling of a step that had to wait for the tokens of the one before, which has been collected.

        `waits`: until editors have found what they need, which may take milliseconds; otherwise only if they have.
        """

    def follow_with(self, follow_up: FollowUp) -> None:
        """Asks for this after the step, as a part of it.

        Called at most once, when the step before has been collected and the next one has not been launched.
        """
        raise AssertionError("`check_lanes` refuses what follows steps")

    def begin(self) -> None:
        """Begins the step, if it can without a wait. May be called again."""

    def run_first(self) -> None:
        """Runs the first layer. Raises the errors of `Channel.wait`."""

    def run_most(self) -> None:
        """Runs three quarters. Raises the errors of `Channel.wait`."""

    def collect(self) -> StepResult:
        """The result of the step, which it runs or waits for. Raises the errors of `Channel.wait`."""
        raise NotImplementedError


class StepRunner(Protocol):
    """What the engine needs: a `ModelRunner`, which has the docstrings, or `LaneRunners` with one for each lane."""

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None: ...
    def capture_ahead(self) -> bool: ...
    def open(self, sequence: RequestState) -> None: ...
    def move(self, sequence: RequestState, lane: int) -> None: ...
    def launch(self, plan: StepPlan, channel: Channel) -> RunningStep: ...


class ModelRunner:
    """Runs a `DenseBackend` through all layers, with a handoff to the attention worker after each."""

    def __init__(
        self,
        backend: DenseBackend,
        sampler: Sampler,
        num_layers: int,
        max_num_seqs: int,
        features: Iterable[Feature] = (),
        hook: StepHook | None = None,
    ) -> None:
        """`features`: those of all sequences that are opened; `hook`: None: nothing is kept of steps"""
        self._backend = backend
        self._sampler = sampler
        self._num_layers = num_layers
        self._features = {feature.sequence_type: feature for feature in features}
        self._with_kernels = tuple(feature for feature in self._features.values() if feature.has_kernels)
        self._hook = hook or StepHook()
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs))
        self._rows = BatchRows(max_num_seqs)
        self._sequences: dict[int, RequestState] = {}  # by seq_id
        self._running: dict[int, RequestState] = {}  # by slot
        self._not_sampled = list[RequestState]()  # those with a slot that the sampler does not know yet
        self._batch: Batch | None = None  # of the newest plan; None: one of its ids may mean another sequence by now

    def attach(self, channels: Iterable[Channel], ranks: LeadingRanks | None = None) -> None:
        """Makes later steps run on these channels only; forgets all sequences. `ranks`: those that compute with it."""
        if ranks is not None:
            assert isinstance(self._backend, LeadingBackend), "the backend of one rank has no others"
            self._backend.use_ranks(ranks)
        for feature in self._features.values():
            feature.attached(ranks)
        for sequence in list(self._running.values()):
            self._release_slot(sequence)
        self._sequences.clear()
        self._batch = None
        self._hook.forget_all()

    def capture_ahead(self) -> bool:
        """Prepares one kind of later steps while none is under way; False if all are prepared. May take 50 ms."""
        return False

    def open(self, sequence: RequestState) -> None:
        """Adds a sequence, which later plans may name until one closes it."""
        for feature in sequence.features:
            feature.restore(sequence.token_ids[sequence.spec.num_prompt_tokens :])
        self._batch = None
        self._sequences[sequence.seq_id] = sequence

    def move(self, sequence: RequestState, lane: int) -> None:
        """A sequence leaves this lane, in which no step is under way with it, for its own."""
        raise AssertionError("a single lane has no other one")

    def forget(self, seq_id: int) -> None:
        """A sequence goes on in another lane. No step under way has it."""
        self._batch = None
        sequence = self._sequences.pop(seq_id)
        if sequence.slot is not None:
            self._release_slot(sequence)

    def launch(self, plan: StepPlan, channel: Channel) -> RunningStep:
        """Launches a step on the channel of its lane.

        On a CPU nothing runs concurrently with the host: the step runs when it is collected, in plan order.
        """
        return _LazyStep(self, self.bind(plan), channel)

    def bind(self, plan: StepPlan) -> BoundPlan:
        """Finds the sequences of a plan, after its closings and forks. Called as soon as the plan is published."""
        closed = [self._sequences.pop(seq_id) for seq_id in plan.close_seq_ids if seq_id in self._sequences]
        for fork in plan.forks:
            if (child := self._sequences.get(fork.child_seq_id)) is not None:
                assert child.slot is None, "it was opened because it has options of its own, and has not run"
                del child.token_ids[fork.position :]
                continue
            parent = self._sequences[fork.parent_seq_id]
            self._sequences[fork.child_seq_id] = parent.fork(fork.child_seq_id, fork.position)
        for seq_id, token_id in plan.forced:
            self._rows.extend(self._sequences[seq_id], (token_id,))
        seq_ids, batch = plan.entries.seq_ids, self._batch
        is_same = batch is not None and (batch.seq_ids is seq_ids or np.array_equal(batch.seq_ids, seq_ids))
        if batch is None or closed or plan.forks or not is_same:
            sequences = [self._sequences[seq_id] for seq_id in seq_ids.tolist()]
            batch = self._batch = Batch(seq_ids, sequences)
        return BoundPlan(plan, batch, closed)

    def prepare(self, bound: BoundPlan) -> StepInput:
        """Assigns slots and builds the step's input from the tokens known on the host. Called in plan order."""
        for sequence in bound.closed:
            if sequence.slot is not None:  # otherwise it never ran
                self._release_slot(sequence)
        if bound.closed:
            self._hook.forget(bound.closed)
        batch = bound.batch
        if len(batch.slots) < len(bound.plan.entries):
            self._assign_slots(batch)
        step = self._prepare_newest(bound) or self._prepare_any(bound)
        return self._with_features(step) if batch.features else step

    def _prepare_newest(self, bound: BoundPlan) -> StepInput | None:
        """The input of a step that samples from the newest token of each sequence, as most steps do; None: another one.

        Either the host knows all these tokens, or an earlier step leaves them on the device.
        """
        batch, entries = bound.batch, bound.plan.entries
        num_rows, slots = len(entries), batch.slots
        is_one_each = bound.plan.num_tokens == num_rows == np.count_nonzero(entries.num_logits)
        if not num_rows or not is_one_each:
            return None
        num_unknown = entries.positions - self._rows.num_known[slots] + 1
        least, most = np.minimum.reduce(num_unknown), np.maximum.reduce(num_unknown)
        if least != most or least < 0:
            return None
        positions = entries.positions + 1
        num_fed = num_rows if most else 0
        return StepInput(
            bound,
            np.zeros(num_rows, np.int64) if num_fed else self._rows.last_token[slots],
            batch.every_row[:num_fed],
            slots[:num_fed],
            batch.every_row,
            slots,
            positions,
            positions - batch.num_prompt_tokens,
        )

    def _prepare_any(self, bound: BoundPlan) -> StepInput:
        """The input of any step."""
        batch, entries, rows = bound.batch, bound.plan.entries, self._rows
        slots, num_tokens = batch.slots, entries.num_tokens
        ends = entries.positions + num_tokens
        row_ends = num_tokens.cumsum()
        num_known = rows.num_known[slots]
        token_ids = np.zeros(bound.plan.num_tokens, np.int64)
        # Most entries have one token, the newest one: the host knows it, or an earlier step leaves it in the slot.
        is_newest = (num_tokens == 1) & (entries.positions >= num_known - 1)
        is_fed = is_newest & (ends > num_known)
        others = (~is_newest).nonzero()[0]
        if not is_fed.all():
            token_ids[row_ends[is_newest] - 1] = rows.last_token[slots[is_newest]]
        for index in others.tolist():
            row_end = int(row_ends[index])
            is_fed[index] = self._copy_known(entries[index], batch.sequences[index], row_end, token_ids)
        fed = is_fed.nonzero()[0]
        sampled = SampledRows.of(entries, row_ends)
        of_rows = slots[sampled.entries]
        positions = ends[sampled.entries] - sampled.num_after
        return StepInput(
            bound,
            token_ids,
            row_ends[fed] - 1,
            slots[fed],
            sampled.rows,
            of_rows,
            positions,
            positions - batch.num_prompt_tokens[sampled.entries],
        )

    def _copy_known(self, entry: PlanEntry, sequence: RequestState, row_end: int, token_ids: np.ndarray) -> bool:
        """Writes the known tokens and drafts of an entry before `row_end`; returns whether its last one is unknown."""
        _, position, num_tokens, _, drafts = entry
        first_row = row_end - num_tokens
        known = sequence.token_ids[position : position + num_tokens - len(drafts)]
        assert not drafts or len(known) + len(drafts) == num_tokens, "drafts follow tokens that are known"
        token_ids[first_row : first_row + len(known) + len(drafts)] = [*known, *drafts]
        return len(known) + len(drafts) < num_tokens

    def _with_features(self, step: StepInput) -> StepInput:
        """The input of a step some of whose sequences have features."""
        batch = step.bound.batch
        plan, num_known = step.bound.plan, self._rows.num_known[batch.slots]
        view = StepView(plan.entries, step.token_ids, batch.token_lists, num_known, plan.extra_rows)
        parts: dict[Feature, StepPart] = {}
        for kind, rows in batch.features.items():
            feature = self._features[kind]
            if (part := feature.prepare_step(view, rows)) is not None:
                parts[feature] = part
        if not batch.has_output and self._backend.skips_logits and not self._hook.needs_logits:
            step = replace(step, has_output=False, sampled_rows=step.sampled_rows[:0])
        hidden_rows = [part.hidden_rows for part in parts.values() if part.hidden_rows is not None]
        return replace(
            step,
            parts=parts,
            hidden_rows=np.concatenate(hidden_rows) if hidden_rows else None,
            needs_residual=any(part.needs_further_rows for part in parts.values()),
            waits_for_tokens=any(part.waits_for_tokens for part in parts.values()),
            layer_readers=[part for part in parts.values() if part.reads_layers],
            input_embeds=InputEmbeds.join([each for part in parts.values() if (each := part.input_embeds) is not None]),
        )

    @torch.inference_mode()
    def begin(self, step: StepInput, channel: Channel) -> LayerRun:
        """Runs a step up to its first wait."""
        token_ids = torch.from_numpy(step.token_ids)
        if len(step.fed_rows):
            token_ids[step.fed_rows] = self._sampler.last_token[torch.from_numpy(step.fed_slots)]
        self._begin_step(step, channel, len(token_ids), len(step.sampled_rows))
        layers = LayerRun(self._backend, channel, self._num_layers, self._hook.residuals_out(), step.layer_readers)
        layers.begin(token_ids, step.input_embeds)
        return layers

    @torch.inference_mode()
    def run_rest(
        self, step: StepInput, layers: LayerRun, channel: Channel, follow_up: FollowUp | None = None
    ) -> StepResult:
        """Runs the other layers, the sampler, and what follows. Raises the errors of `Channel.wait`."""
        hidden_out = self._hook.hidden_out(len(step.sampled_rows)) if follow_up is not None else None
        logits, residual = layers.finish(torch.from_numpy(step.sampled_rows), hidden_out)
        host_token_ids = torch.empty(len(logits), dtype=torch.int64)
        tokens = self.finish(step, logits, residual, channel, host_token_ids)
        return (tokens if follow_up is None else self.follow(tokens, follow_up)).read()

    def finish(
        self,
        step: StepInput,
        logits: torch.Tensor,
        residual: torch.Tensor | None,
        channel: Channel,
        host_token_ids: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> PendingTokens:
        """Samples tokens and ranks those to report. The results are on the host when the device has run the step.

        logits: [num_sampled, vocab_size], may be overwritten; host_token_ids: int64 [num_sampled], filled;
        residual: that of `LayerRun.finish`; None if the step does not need it
        hidden: [n, hidden], of the step's hidden rows; None: they are computed from the residual
        """
        self._add_to_sampler()
        parts, num_logprobs = step.parts.values(), dict[int, int]()
        ranked = token_ids = None
        for part in parts:
            part.copy_logits(logits)
        if len(step.sampled_rows):
            sampled = self._sampler.sample(logits, step.sampled_slots, step.positions, step.output_lens, host_token_ids)
            token_ids = sampled.token_ids
            num_logprobs, ranked = sampled.num_logprobs, sampled.ranked and sampled.ranked.to_host()
        elif not step.has_output:
            host_token_ids = torch.zeros(int(step.bound.plan.entries.num_logits.sum()), dtype=torch.int64)
        if step.hidden_rows is not None:
            if hidden is None:
                assert residual is not None, "hidden states need the step's residual"
                hidden = self._compute_hidden(step.hidden_rows, channel.attn_out[: len(step.token_ids)], residual)
            _give_hidden(parts, hidden)
        if step.needs_residual:
            assert residual is not None, "further rows need the step's residual"
            attn_out = channel.attn_out[: len(step.token_ids)]
            further = FurtherRows(self._backend, attn_out, residual, self._max_num_seqs)
            for part in parts:
                part.compute_rows(further)
        self._hook.keep(step.bound.plan.entries, step.bound.batch.sequences, token_ids)
        return PendingTokens(step.bound, self._rows, host_token_ids, num_logprobs, ranked, parts, token_ids)

    def _compute_hidden(self, rows: np.ndarray, attn_out: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Those of some rows, int64 [n], after the final norm: [n, hidden]."""
        hidden = torch.empty(len(rows), residual.shape[1], dtype=attn_out.dtype, device=attn_out.device)
        on_device = upload(rows, attn_out.device)
        self._backend.hidden(attn_out, residual, on_device, hidden)
        return hidden

    def follow(self, tokens: PendingTokens, follow_up: FollowUp) -> PendingTokens:
        """Enqueues what follows the newest step, unless that samples no token."""
        if tokens.sampled is None:
            return tokens
        begin_s = time.perf_counter()
        bound = tokens.bound
        follow_up.enqueue(bound.plan.entries, bound.batch.sequences, tokens.sampled)
        return replace(tokens, follow_up=follow_up, follow_up_s=time.perf_counter() - begin_s)

    def _begin_step(self, step: StepInput, channel: Channel, num_rows: int, num_sampled: int) -> None:
        channel.begin_step(step.bound.plan.step_id, num_rows)
        for feature in self._with_kernels:
            feature.begin_step(step.parts.get(feature), num_rows)
        self._backend.begin_step(step.bound.plan, num_rows, num_sampled, step.input_embeds)
        for part in step.parts.values():
            part.before_layers(channel)

    def _assign_slots(self, batch: Batch) -> None:
        """Gives slots to the new sequences of a batch, and finds those of all."""
        for sequence in batch.sequences:
            if sequence.slot is None:
                self._assign_slot(sequence)
        batch.take_rows(self._rows)

    def _assign_slot(self, sequence: RequestState) -> None:
        slot = self._free_slots.pop()
        self._rows.begin(slot, sequence)
        self._running[slot] = sequence
        self._not_sampled.append(sequence)

    def _add_to_sampler(self) -> None:
        """Tells the sampler of new sequences: behind the layers of their first step, which nobody shall wait for."""
        new, self._not_sampled = self._not_sampled, []
        for sequence in new:
            assert sequence.slot is not None, "it has a slot"
            spec, num_prompt_tokens = sequence.spec, sequence.spec.num_prompt_tokens
            prompt_token_ids: SequenceOf[int] = sequence.token_ids[:num_prompt_tokens]
            for feature in sequence.features:
                prompt_token_ids = feature.vocabulary_tokens(prompt_token_ids)
            self._sampler.add(
                sequence.slot,
                spec.sampling,
                prompt_token_ids,
                sequence.token_ids[num_prompt_tokens:],
                spec.stop_token_ids,
                sequence.num_logprobs,
                sequence.features,
            )

    def _release_slot(self, sequence: RequestState) -> None:
        assert sequence.slot is not None, "it has a slot"
        self._add_to_sampler()
        self._sampler.remove(sequence.slot)
        del self._running[sequence.slot]
        self._free_slots.append(sequence.slot)
        self._rows.end(sequence)


def _give_hidden(parts: Iterable[StepPart], hidden: torch.Tensor) -> None:
    """Gives each part the hidden states of its rows; `hidden` has those of all, and padding."""
    first = 0
    for part in parts:
        if part.hidden_rows is not None:
            end = first + len(part.hidden_rows)
            part.take_hidden(hidden[first:end])
            first = end


class LayerRun:
    """All layers of a step, with one handoff in each direction between two segments, in two parts.

    `residuals_out` gets the residuals before its layers, if it is given, and `readers` the rows of each layer.
    """

    def __init__(
        self,
        backend: DenseBackend,
        channel: Channel,
        num_layers: int,
        residuals_out: KeptResiduals | None = None,
        readers: SequenceOf[StepPart] = (),
    ) -> None:
        self._backend = backend
        self._channel = channel
        self._num_layers = num_layers
        self._residuals_out = residuals_out
        self._readers = readers
        self._num_tokens = 0
        self._qkv_ready = Flag.QKV_READY  # the flag of a step of so many tokens
        self._input_embeds: GivenEmbeds | None = None
        self._residual: torch.Tensor | None = None
        self._layer = 0  # the attention worker computes it, or will next

    def begin(self, token_ids: torch.Tensor, input_embeds: GivenEmbeds | None = None) -> None:
        """Runs the first segment; the attention worker computes the first layer meanwhile.

        token_ids: int64 [num_tokens]
        """
        self._num_tokens, self._input_embeds = len(token_ids), input_embeds
        self._qkv_ready = qkv_flag(self._num_tokens)
        self._channel.begin_layers(self._num_tokens)
        self._keep(0, self._backend.first(token_ids, self._channel.qkv[: self._num_tokens], input_embeds))
        self._channel.signal(self._qkv_ready)

    def run_first(self) -> None:
        """Runs the first layer, unless it is the last one, too."""
        if self._layer == 0 and self._num_layers > 1:
            self.go_on()

    def run_most(self) -> None:
        """Runs up to three quarters of the layers."""
        while self._layer < self._num_layers * 3 // 4:
            self.go_on()

    def finish(
        self, sampled_rows: torch.Tensor, hidden_out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the rest.

        sampled_rows: int64 [num_sampled] -> logits [num_sampled, vocab_size], and the residual [num_tokens,
        hidden], from which `DenseBackend.last` can compute further rows. `hidden_out` gets the sampled rows' hidden
        states [num_sampled, hidden], if it is given.
        """
        while self._layer + 1 < self._num_layers:
            self.go_on()
        self._channel.wait(Flag.ATTENTION_READY)
        assert self._residual is not None, "the step has begun"
        if not len(sampled_rows) and not self._backend.always_ends:
            return torch.empty(0, 0), self._residual
        attn_out = self._channel.attn_out[: self._num_tokens]
        return self._backend.last(attn_out, self._residual, sampled_rows, hidden_out), self._residual

    def go_on(self) -> None:
        """Finishes a layer with its attention, and begins the next one."""
        channel, num_tokens = self._channel, self._num_tokens
        channel.wait(Flag.ATTENTION_READY)
        assert self._residual is not None, "the step has begun"
        attn_out, qkv = channel.fetch_attn_out(num_tokens), channel.qkv[:num_tokens]
        added = None if self._input_embeds is None else self._input_embeds.after_layer(self._layer)
        residual = self._backend.middle(self._layer, attn_out, self._residual, qkv, added)
        self._layer += 1
        self._keep(self._layer, residual)
        channel.signal(self._qkv_ready)

    def _keep(self, layer: int, residual: torch.Tensor) -> None:
        self._residual = residual
        if self._residuals_out is not None:
            self._residuals_out.put(layer, residual)
        for reader in self._readers:
            reader.take_layer(layer, self._channel.qkv[: self._num_tokens])


@dataclass(slots=True, eq=False)
class _LazyStep(RunningStep):
    runner: ModelRunner
    bound: BoundPlan
    channel: Channel
    follow_up: FollowUp | None = None
    step: StepInput | None = None  # None until it runs
    layers: LayerRun | None = None

    def follow_with(self, follow_up: FollowUp) -> None:
        self.follow_up = follow_up

    def begin(self) -> None:
        if self.step is not None:
            return
        self.step = self.runner.prepare(self.bound)
        if self.bound.plan.entries:
            self.layers = self.runner.begin(self.step, self.channel)

    def run_first(self) -> None:
        self._run(LayerRun.run_first)

    def run_most(self) -> None:
        self._run(LayerRun.run_most)

    def _run(self, part: Callable[[LayerRun], None]) -> None:
        self.begin()  # prepares the step, whose tensors may be changed outside of inference mode
        if self.layers is not None:
            with torch.inference_mode():
                part(self.layers)

    def collect(self) -> StepResult:
        self.begin()
        if self.step is None or self.layers is None:
            return StepResult(NO_ROWS)
        return self.runner.run_rest(self.step, self.layers, self.channel, self.follow_up)
