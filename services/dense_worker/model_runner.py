"""`ModelRunner`: turns a plan into one dense stroke after another, and logits into tokens.

Runs on the engine thread. Every running sequence has a *slot*: its row in the sampler's state, where the
last token it got stays on the device as the input of its next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.common.channel import Channel, Flag, qkv_flag
from services.dense_worker.backends import DenseBackend
from services.dense_worker.prompt_logprobs import PromptStretch, find_stretch, rank_prompt_tokens
from services.dense_worker.sampler import Sampler
from services.dense_worker.step_plan import PlanEntry, StepPlan
from services.dense_worker.step_tokens import PendingTokens, StepTokens


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step needs beside the device's own state. Rows are the step's tokens, in batch order."""

    token_ids: torch.Tensor  # int64 [num_tokens]; rows fed from the device hold anything
    fed_rows: torch.Tensor  # int64 [num_fed]: rows whose token an earlier step leaves on the device
    fed_slots: torch.Tensor  # int64 [num_fed]: where it lies
    sampled_rows: torch.Tensor  # int64 [num_sampled]: last row of every entry that yields a token
    sampled_slots: np.ndarray  # int64 [num_sampled]
    positions: np.ndarray  # int64 [num_sampled]: index of the token to be sampled, in its sequence
    output_lens: np.ndarray  # int64 [num_sampled]: output tokens before it
    sampled_seq_ids: list[int]  # [num_sampled]
    stretches: list[PromptStretch]  # of prompts whose log-probabilities are wanted


class RunningStep(Protocol):
    """A step that has been launched."""

    def is_done(self) -> bool:
        """Whether nothing keeps `collect` from going ahead."""

    def collect(self) -> StepTokens:
        """What the step yields, once it is there. Raises what `Channel.wait` raises."""


class ModelRunner:
    """Drives a `DenseBackend` through the layers, meeting the attention worker after each."""

    def __init__(self, backend: DenseBackend, sampler: Sampler, num_layers: int, max_num_seqs: int) -> None:
        self._backend = backend
        self._sampler = sampler
        self._num_layers = num_layers
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs))
        self._slots: dict[int, int] = {}  # by seq_id
        self._channel: Channel | None = None

    def attach(self, channel: Channel) -> None:
        """Meets the attention worker in `channel` from now on; every sequence is forgotten."""
        for seq_id in list(self._slots):
            self._release_slot(seq_id)
        self._channel = channel

    def launch(self, plan: StepPlan) -> RunningStep:
        """On a CPU nothing can run beside the host: the step runs when it is collected, in plan order."""
        return _LazyStep(self, plan)

    def prepare(self, plan: StepPlan) -> StepInput:
        """Gives slots and builds the step's input from what is known on the host. Called in plan order."""
        for seq_id in plan.close_seq_ids:
            self._release_slot(seq_id)
        token_ids: list[int] = []
        fed_rows, fed_slots, sampled_rows, sampled_slots, positions, output_lens = [], [], [], [], [], []
        sampled_seq_ids: list[int] = []
        stretches: list[PromptStretch] = []
        for entry in plan.entries:
            slot = self._slots.get(entry.sequence.seq_id)
            if slot is None:
                slot = self._assign_slot(entry)
            if entry.sequence.num_prompt_logprobs is not None and (stretch := find_stretch(entry, len(token_ids))):
                stretches.append(stretch)
            known = _known_token_ids(entry)
            token_ids += known
            if len(known) < entry.num_tokens:
                fed_rows.append(len(token_ids))
                fed_slots.append(slot)
                token_ids.append(0)
            if entry.is_sampled:
                position = entry.num_computed_tokens + entry.num_tokens
                sampled_rows.append(len(token_ids) - 1)
                sampled_slots.append(slot)
                sampled_seq_ids.append(entry.sequence.seq_id)
                positions.append(position)
                output_lens.append(position - entry.sequence.num_prompt_tokens)
        return StepInput(
            *(torch.tensor(column, dtype=torch.int64) for column in (token_ids, fed_rows, fed_slots, sampled_rows)),
            *(np.array(column, dtype=np.int64) for column in (sampled_slots, positions, output_lens)),
            sampled_seq_ids,
            stretches,
        )

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepTokens:
        """Runs all layers, and the sampler. Raises what `Channel.wait` raises."""
        assert self._channel is not None, "steps need an attachment"
        token_ids = step.token_ids
        token_ids[step.fed_rows] = self._sampler.last_token[step.fed_slots]
        logits = run_layers(self._backend, self._channel, self._num_layers, token_ids, step.sampled_rows)
        return self.finish(step, logits, self._channel, torch.empty(len(logits), dtype=torch.int64)).read()

    def finish(
        self, step: StepInput, logits: torch.Tensor, channel: Channel, host_token_ids: torch.Tensor
    ) -> PendingTokens:
        """Samples, and ranks what is to be reported; all of it is on the host once the device has run it.

        logits: float32 [num_sampled, vocab_size], overwritten; host_token_ids: int64 [num_sampled], filled
        """
        num_logprobs: dict[int, int] = {}
        ranked = prompt_ranked = None
        if len(step.sampled_rows):
            sampled = self._sampler.sample(logits, step.sampled_slots, step.positions, step.output_lens)
            host_token_ids.copy_(sampled.token_ids, non_blocking=True)
            if sampled.ranked is not None:
                num_logprobs = {step.sampled_seq_ids[row]: num for row, num in sampled.num_logprobs.items()}
                ranked = sampled.ranked.to_host()
        if step.stretches:
            attn_out = channel.attn_out[: len(step.token_ids)]
            prompt_ranked = rank_prompt_tokens(self._backend, attn_out, step.stretches, self._max_num_seqs).to_host()
        return PendingTokens(host_token_ids, num_logprobs, ranked, step.stretches, prompt_ranked)

    def _assign_slot(self, entry: PlanEntry) -> int:
        sequence = entry.sequence
        slot = self._slots[sequence.seq_id] = self._free_slots.pop()
        self._sampler.add(
            slot,
            sequence.sampling,
            sequence.prompt_token_ids,
            sequence.output_token_ids,
            sorted(sequence.stop_token_ids),
            sequence.num_logprobs,
        )
        return slot

    def _release_slot(self, seq_id: int) -> None:
        slot = self._slots.pop(seq_id, None)
        if slot is not None:  # a sequence may be closed before it ever ran
            self._sampler.remove(slot)
            self._free_slots.append(slot)


def run_layers(
    backend: DenseBackend,
    channel: Channel,
    num_layers: int,
    token_ids: torch.Tensor,
    sampled_rows: torch.Tensor,
) -> torch.Tensor:
    """Through all segments, one handoff each way between two of them.

    token_ids: int64 [num_tokens]; sampled_rows: int64 [num_sampled] -> logits float32 [num_sampled, vocab_size]
    """
    num_tokens = len(token_ids)
    qkv = channel.qkv[:num_tokens]
    qkv_ready = qkv_flag(num_tokens)
    backend.first(token_ids, qkv)
    for layer in range(num_layers):
        channel.signal(qkv_ready)
        channel.wait(Flag.ATTENTION_READY)
        if layer + 1 < num_layers:
            backend.middle(layer, channel.fetch_attn_out(num_tokens), qkv)
    if not len(sampled_rows):
        return torch.empty(0, 0)
    return backend.last(channel.attn_out[:num_tokens], sampled_rows)


def _known_token_ids(entry: PlanEntry) -> list[int]:
    """The entry's tokens, less the last one if it has been sampled but is not known on the host yet."""
    sequence, start = entry.sequence, entry.num_computed_tokens
    end = start + entry.num_tokens
    num_prompt_tokens = sequence.num_prompt_tokens
    if start >= num_prompt_tokens:
        return sequence.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
    known = sequence.prompt_token_ids[start:end]
    if end > num_prompt_tokens:
        known = known + sequence.output_token_ids[: end - num_prompt_tokens]
    return known


@dataclass(frozen=True, slots=True)
class _LazyStep:
    runner: ModelRunner
    plan: StepPlan

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepTokens:
        step = self.runner.prepare(self.plan)
        return self.runner.run(step) if self.plan.entries else StepTokens([])
