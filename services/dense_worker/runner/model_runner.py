"""`ModelRunner`: runs the dense strokes of a plan and turns logits into tokens.

It runs on the engine thread and sees only plans: it keeps what a plan says about each sequence, and its tokens. A
running sequence has a *slot*: its row in the sampler's state, where its last token stays on the device as the input of
its next step.
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
from services.dense_worker.backends import DenseBackend
from services.dense_worker.lora.tensors import LoraStore
from services.dense_worker.prompts.given_rows import GivenRows, GivenRowsOfStep
from services.dense_worker.prompts.loaded_table import LoadedTable
from services.dense_worker.runner.guesses import Guessing, KeptResiduals
from services.dense_worker.runner.known_sequence import KnownSequence
from services.dense_worker.runner.row_slots import row_slots
from services.dense_worker.runner.step_logits import PendingLogits, WantedLogits, copy_prompts, copy_sampled
from services.dense_worker.runner.step_tokens import PendingTokens
from services.dense_worker.sampling.prompt_logprobs import PromptSpan, find_span, rank_prompt_tokens
from services.dense_worker.sampling.sampler import Sampler
from services.grammar.matcher import GrammarMatcher
from services.step import NO_ROWS, NewSequence, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan with its sequences. Later sequences may have the same ids, so they are looked up early."""

    plan: StepPlan
    sequences: SequenceOf[KnownSequence]  # aligned with the plan's entries
    closed: SequenceOf[KnownSequence]


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of a step besides the device's own state. Rows are the step's tokens, in batch order."""

    bound: BoundPlan
    token_ids: torch.Tensor  # int64 [num_tokens]; arbitrary in rows fed from the device
    fed_rows: torch.Tensor  # int64 [num_fed]: rows whose token an earlier step leaves on the device
    fed_slots: torch.Tensor  # int64 [num_fed]: slots that hold these tokens
    sampled_rows: torch.Tensor  # int64 [num_sampled]: rows whose logits the plan needs
    sampled_slots: np.ndarray  # int64 [num_sampled]
    positions: np.ndarray  # int64 [num_sampled]: index of the token to be sampled, in its sequence
    output_lens: np.ndarray  # int64 [num_sampled]: output tokens before it
    spans: list[PromptSpan]  # of prompts whose log-probabilities are requested
    has_unknown_tokens: bool  # a sequence with a grammar lacks its last token, which the step before samples
    wanted_logits: WantedLogits  # that are reported
    given: GivenRows | None  # rows whose vectors are given, on the host; None: there are none

    @property
    def needs_residual(self) -> bool:
        """Whether rows beyond the sampled ones need logits."""
        return bool(self.spans or self.wanted_logits.prompts)


class RunningStep(Protocol):
    """A step that has been launched."""

    runs_when_collected: bool  # on the thread that calls `collect`; otherwise on a device, at once

    def is_done(self) -> bool:
        """Whether `collect` would return without waiting. May enqueue the rest of the step."""

    def guess(self, num_tokens: int) -> None:
        """Asks for guesses of so many tokens after the step's, which become part of its result.

        Called at most once, when the step before has been collected and the next one has not been launched.
        """

    def collect(self, near_end: Callable[[], None] | None = None) -> StepResult:
        """The result of the step; waits for it. Raises the errors of `Channel.wait`.

        `near_end` is called when three quarters of the layers have run, if the step runs when it is collected.
        """


class ModelRunner:
    """Runs a `DenseBackend` through all layers, with a handoff to the attention worker after each."""

    def __init__(
        self,
        backend: DenseBackend,
        sampler: Sampler,
        num_layers: int,
        max_num_seqs: int,
        lora: LoraStore | None = None,
        guessing: Guessing | None = None,
    ) -> None:
        self._backend = backend
        self._sampler = sampler
        self._num_layers = num_layers
        self._lora = lora  # the backend's; None: no sequence has an adapter
        self._guessing = guessing
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs))
        self._sequences: dict[int, KnownSequence] = {}  # by seq_id
        self._used_slots: set[int] = set()

    @property
    def takes_prompt_tables(self) -> bool:
        """Whether sequences may have vectors in place of some of their prompt tokens."""
        return self._backend.takes_given_rows

    @property
    def gives_hidden_states(self) -> bool:
        """Whether sequences may ask for their hidden states."""
        return self._backend.gives_hidden_states

    def attach(self, channels: Iterable[Channel]) -> None:
        """Makes later steps run on these channels only; forgets all sequences."""
        for slot in list(self._used_slots):
            self._release_slot(slot)
        self._sequences.clear()
        if self._guessing is not None:
            self._guessing.forget_all()

    def open(
        self,
        new: NewSequence,
        grammar: GrammarMatcher | None = None,
        adapter_slot: int | None = None,
        table: LoadedTable | None = None,
    ) -> None:
        """Adds a sequence, which later plans may name until one closes it. Its adapter stays in its slot meanwhile."""
        if grammar is not None:
            grammar.sync(new.token_ids[new.num_prompt_tokens :])
        self._sequences[new.seq_id] = KnownSequence(
            new, list(new.token_ids), grammar, adapter_slot=adapter_slot, table=table
        )

    def launch(self, plan: StepPlan, channel: Channel) -> RunningStep:
        """Launches a step on the channel of its lane.

        On a CPU nothing runs concurrently with the host: the step runs when it is collected, in plan order.
        """
        return _LazyStep(self, self.bind(plan), channel)

    def bind(self, plan: StepPlan) -> BoundPlan:
        """Finds the sequences of a plan, after its closings and forks. Called as soon as the plan is published."""
        closed = [self._sequences.pop(seq_id) for seq_id in plan.close_seq_ids if seq_id in self._sequences]
        for fork in plan.forks:
            if (answer := self._sequences.get(fork.child_seq_id)) is not None:
                del answer.token_ids[fork.position :]  # it was opened because it has options of its own
                continue
            parent = self._sequences[fork.parent_seq_id]
            assert parent.grammar is None, "a fork would need a grammar of its own"
            self._sequences[fork.child_seq_id] = KnownSequence(
                parent.new, parent.token_ids[: fork.position], adapter_slot=parent.adapter_slot, table=parent.table
            )
        for seq_id, token_id in plan.chosen:
            self._sequences[seq_id].token_ids.append(token_id)
        return BoundPlan(plan, [self._sequences[entry.seq_id] for entry in plan.entries], closed)

    def prepare(self, bound: BoundPlan) -> StepInput:
        """Assigns slots and builds the step's input from the tokens known on the host. Called in plan order."""
        for sequence in bound.closed:
            if sequence.slot is not None:  # otherwise it never ran
                self._release_slot(sequence.slot)
        if self._guessing is not None and bound.closed:
            self._guessing.forget(bound.closed)
        token_ids: list[int] = []
        fed_rows, fed_slots, sampled_rows, sampled_slots, positions, output_lens = [], [], [], [], [], []
        spans: list[PromptSpan] = []
        given = GivenRowsOfStep()
        has_unknown_tokens = False
        wanted_logits = WantedLogits()
        for entry, sequence in zip(bound.plan.entries, bound.sequences, strict=True):
            slot = sequence.slot
            if slot is None:
                slot = self._assign_slot(sequence)
            new = sequence.new
            if new.num_prompt_logprobs is not None and (span := find_span(entry, new, len(token_ids))):
                spans.append(span)
            if new.return_context_logits:
                wanted_logits.add_prompt(entry, new, len(token_ids))
            if new.return_generation_logits:
                wanted_logits.sampled.extend(range(len(sampled_rows), len(sampled_rows) + entry.num_logits))
            _, position, num_tokens, num_logits, drafts = entry
            known = sequence.token_ids[position : position + num_tokens - len(drafts)]
            if sequence.table is not None:
                known = given.take(sequence.table, known, len(token_ids))
            token_ids += known
            if drafts:
                assert len(known) + len(drafts) == num_tokens, "drafts follow tokens that are known"
                token_ids += drafts
            elif len(known) < num_tokens:
                fed_rows.append(len(token_ids))
                fed_slots.append(slot)
                token_ids.append(0)
            end, num_rows = position + num_tokens, len(token_ids)
            if sequence.grammar is not None and num_logits and len(sequence.token_ids) < end - len(drafts):
                has_unknown_tokens = True
            for back in range(num_logits, 0, -1):
                sampled_rows.append(num_rows - back)
                sampled_slots.append(slot)
                positions.append(end - back + 1)
                output_lens.append(end - back + 1 - new.num_prompt_tokens)
        return StepInput(
            bound,
            *(torch.tensor(column, dtype=torch.int64) for column in (token_ids, fed_rows, fed_slots, sampled_rows)),
            *(np.array(column, dtype=np.int64) for column in (sampled_slots, positions, output_lens)),
            spans,
            has_unknown_tokens,
            wanted_logits,
            given.gather(),
        )

    @torch.inference_mode()
    def run(
        self,
        step: StepInput,
        channel: Channel,
        num_guesses: int = 0,
        near_end: Callable[[], None] | None = None,
    ) -> StepResult:
        """Runs all layers and the sampler, and what guesses if asked to. Raises the errors of `Channel.wait`."""
        token_ids = step.token_ids
        token_ids[step.fed_rows] = self._sampler.last_token[step.fed_slots]
        self._begin_step(step.bound, len(token_ids))
        logits, residual = run_layers(
            self._backend,
            channel,
            self._num_layers,
            token_ids,
            step.sampled_rows,
            step.given,
            self._hidden_out(len(step.sampled_rows)) if num_guesses else None,
            near_end,
            self._residuals_out(),
        )
        host_token_ids = torch.empty(len(logits), dtype=torch.int64)
        tokens = self.finish(step, logits, residual, channel, host_token_ids)
        return (self.with_guesses(tokens, num_guesses) if num_guesses else tokens).read()

    def finish(
        self,
        step: StepInput,
        logits: torch.Tensor,
        residual: torch.Tensor | None,
        channel: Channel,
        host_token_ids: torch.Tensor,
    ) -> PendingTokens:
        """Samples tokens and ranks those to report. The results are on the host when the device has run the step.

        logits: float32 [num_sampled, vocab_size], overwritten; host_token_ids: int64 [num_sampled], filled;
        residual: the residual of `run_layers`; None if the step does not need it
        """
        wanted = step.wanted_logits
        num_logprobs: dict[int, int] = {}
        ranked = prompt_ranked = prompt_logits = token_ids = None
        kept_logits = copy_sampled(logits, wanted)
        if len(step.sampled_rows):
            sampled = self._sampler.sample(logits, step.sampled_slots, step.positions, step.output_lens)
            token_ids = sampled.token_ids
            host_token_ids.copy_(token_ids, non_blocking=True)
            num_logprobs, ranked = sampled.num_logprobs, sampled.ranked and sampled.ranked.to_host()
        if wanted.prompts:
            assert residual is not None, "prompts need the step's residual"
            attn_out = channel.attn_out[: len(step.token_ids)]
            prompt_logits = copy_prompts(self._backend, attn_out, residual, wanted.prompts, self._max_num_seqs)
        if step.spans:
            assert residual is not None, "spans need the step's residual"
            attn_out = channel.attn_out[: len(step.token_ids)]
            ranked_rows = rank_prompt_tokens(self._backend, attn_out, residual, step.spans, self._max_num_seqs)
            prompt_ranked = ranked_rows.to_host()
        entries, sequences = step.bound.plan.entries, step.bound.sequences
        if self._guessing is not None:
            self._guessing.keep(entries, sequences, token_ids)
        logits = PendingLogits(wanted, kept_logits, prompt_logits) if wanted.sampled or wanted.prompts else None
        return PendingTokens(
            entries, sequences, host_token_ids, num_logprobs, ranked, prompt_ranked, logits, token_ids
        )

    def with_guesses(self, tokens: PendingTokens, num_guesses: int) -> PendingTokens:
        """The tokens of the newest step with guesses of the next ones, unless it samples none."""
        assert self._guessing is not None, "a step is asked for guesses only if there is what guesses"
        if tokens.sampled is None:
            return tokens
        begin_s = time.perf_counter()
        guesses = self._guessing.guess(tokens.entries, tokens.sequences, tokens.sampled, num_guesses)
        return replace(tokens, guesses=guesses, guess_s=time.perf_counter() - begin_s)

    def _hidden_out(self, num_sampled: int) -> torch.Tensor | None:
        """Where the step's hidden states go, [num_sampled, hidden]; None if nobody reads them."""
        return None if self._guessing is None else self._guessing.hidden_out(num_sampled)

    def _residuals_out(self) -> KeptResiduals | None:
        """Where the step's residuals go; None if nobody reads them."""
        return None if self._guessing is None else self._guessing.residuals_out()

    def _begin_step(self, bound: BoundPlan, num_rows: int) -> None:
        if self._lora is not None:
            self._lora.begin_step(row_slots(bound.plan.entries, bound.sequences, num_rows))
        self._backend.begin_step(bound.plan, num_rows)

    def _assign_slot(self, sequence: KnownSequence) -> int:
        slot = sequence.slot = self._free_slots.pop()
        self._used_slots.add(slot)
        new, num_prompt_tokens = sequence.new, sequence.new.num_prompt_tokens
        prompt_token_ids = sequence.token_ids[:num_prompt_tokens]
        if sequence.table is not None:  # the sampler knows only tokens of the vocabulary
            prompt_token_ids = sequence.table.without_rows(prompt_token_ids)
        self._sampler.add(
            slot,
            new.sampling,
            prompt_token_ids,
            sequence.token_ids[num_prompt_tokens:],
            new.stop_token_ids,
            new.num_logprobs,
            sequence.grammar,
        )
        return slot

    def _release_slot(self, slot: int) -> None:
        self._sampler.remove(slot)
        self._used_slots.remove(slot)
        self._free_slots.append(slot)


def run_layers(
    backend: DenseBackend,
    channel: Channel,
    num_layers: int,
    token_ids: torch.Tensor,
    sampled_rows: torch.Tensor,
    given: GivenRows | None = None,
    hidden_out: torch.Tensor | None = None,
    near_end: Callable[[], None] | None = None,
    residuals_out: KeptResiduals | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs all segments, with one handoff in each direction between two segments.

    token_ids: int64 [num_tokens]; sampled_rows: int64 [num_sampled]; given: rows with vectors in place of tokens ->
    logits float32 [num_sampled, vocab_size], and the residual [num_tokens, hidden], from which `DenseBackend.last` can
    compute further rows. `hidden_out` gets the sampled rows' hidden states [num_sampled, hidden], if it is given.
    `near_end` is called once, after three quarters of the layers, while the attention worker computes one.
    `residuals_out` gets the residuals before its layers, if it is given.
    """
    num_tokens = len(token_ids)
    qkv = channel.qkv[:num_tokens]
    qkv_ready = qkv_flag(num_tokens)
    residual = backend.first(token_ids, qkv, given)
    if residuals_out is not None:
        residuals_out.put(0, residual)
    for layer in range(num_layers):
        channel.signal(qkv_ready)
        if near_end is not None and layer == num_layers * 3 // 4:
            near_end()
        channel.wait(Flag.ATTENTION_READY)
        if layer + 1 < num_layers:
            residual = backend.middle(layer, channel.fetch_attn_out(num_tokens), residual, qkv)
            if residuals_out is not None:
                residuals_out.put(layer + 1, residual)
    if not len(sampled_rows):
        return torch.empty(0, 0), residual
    return backend.last(channel.attn_out[:num_tokens], residual, sampled_rows, hidden_out), residual


@dataclass(slots=True, eq=False)
class _LazyStep:
    runner: ModelRunner
    bound: BoundPlan
    channel: Channel
    num_guesses: int = 0
    runs_when_collected: ClassVar[bool] = True

    def guess(self, num_tokens: int) -> None:
        self.num_guesses = num_tokens

    def is_done(self) -> bool:
        return True

    def collect(self, near_end: Callable[[], None] | None = None) -> StepResult:
        step = self.runner.prepare(self.bound)
        if not self.bound.plan.entries:
            if near_end is not None:
                near_end()
            return StepResult(NO_ROWS)
        return self.runner.run(step, self.channel, self.num_guesses, near_end)
