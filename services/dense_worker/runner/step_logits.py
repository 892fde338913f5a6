"""The logits that clients ask for: after prompt tokens, and those from which output tokens are sampled.

They are copied to the host in the order of the step's work, before the sampler changes them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from services.dense_worker.backends import DenseBackend
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.prompt_logprobs import MAX_ROWS_AT_A_TIME
from services.dense_worker.sampling.upload import upload
from services.step import Logits, NewSequence, PlanEntry


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step that are prompt tokens whose logits are requested."""

    seq_id: int
    start: int  # index of the first one in the prompt
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """The logits that a step has to report; nearly always none."""

    sampled: list[int] = field(default_factory=list)  # indices of sampled rows
    prompts: list[PromptRows] = field(default_factory=list)

    def add_prompt(self, entry: PlanEntry, new: NewSequence, first_row: int) -> None:
        """Adds the prompt tokens of an entry, whose tokens begin at `first_row`."""
        num_rows = min(entry.num_tokens, new.num_prompt_tokens - entry.position)
        if num_rows > 0:
            self.prompts.append(PromptRows(entry.seq_id, entry.position, first_row, num_rows))


NO_LOGITS = WantedLogits()


@dataclass(frozen=True, slots=True)
class PendingLogits:
    """Tensors on the host that the device fills when it runs the step."""

    wanted: WantedLogits
    sampled: torch.Tensor | None  # float32 [len(wanted.sampled), vocab_size]
    prompts: torch.Tensor | None  # float32 [rows of all prompts, vocab_size]

    def read_sampled(self, seq_id: int, start: int, first_row: int, num_rows: int) -> Logits | None:
        """Those of `num_rows` sampled rows from `first_row` on, for output tokens from `start` on; None if unwanted."""
        if self.sampled is None or first_row not in self.wanted.sampled:
            return None
        index = self.wanted.sampled.index(first_row)
        return Logits(seq_id, start, self.sampled[index : index + num_rows].numpy())

    def read_prompts(self) -> list[Logits]:
        """Those after prompt tokens."""
        found, end = [], 0
        for rows in self.wanted.prompts:
            begin, end = end, end + rows.num_rows
            assert self.prompts is not None, "there are rows"
            found.append(Logits(rows.seq_id, rows.start, self.prompts[begin:end].numpy()))
        return found


def copy_sampled(logits: torch.Tensor, wanted: WantedLogits) -> torch.Tensor | None:
    """Copies the wanted rows of logits (float32 [num_sampled, vocab_size]) to the host."""
    if not wanted.sampled:
        return None
    return to_host(logits[upload(np.array(wanted.sampled, dtype=np.int64), logits.device)])


def copy_prompts(
    backend: DenseBackend,
    attn_out: torch.Tensor,
    residual: torch.Tensor,
    prompts: SequenceOf[PromptRows],
    max_num_rows: int,
) -> torch.Tensor | None:
    """Computes the logits after prompt tokens and copies them to the host. Calls `DenseBackend.last` itself.

    attn_out: [num_tokens, attn_size] of the last layer; residual: [num_tokens, hidden];
    max_num_rows: maximum number of rows in one call of `last`
    """
    rows = np.concatenate([np.arange(each.first_row, each.first_row + each.num_rows) for each in prompts])
    host: torch.Tensor | None = None
    begin = 0
    for some_rows in upload(rows, attn_out.device).split(min(MAX_ROWS_AT_A_TIME, max_num_rows)):
        logits = backend.last(attn_out, residual, some_rows)
        if host is None:
            shape = (len(rows), logits.shape[1])
            host = torch.empty(shape, dtype=torch.float32, pin_memory=logits.device.type == "cuda")
        host[begin : begin + len(some_rows)].copy_(logits, non_blocking=True)
        begin += len(some_rows)
    return host
