"""The logits and hidden states that clients ask for: of all tokens, and those from which output tokens are sampled.

They are copied to the host in the order of the step's work, before the sampler changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from services.dense_worker.backends import DenseBackend
from services.dense_worker.features.returned_logits.prompt_logprobs import MAX_ROWS_AT_A_TIME
from services.dense_worker.runner.request_state import RequestState
from services.dense_worker.sampling.logprobs import to_host
from services.dense_worker.sampling.upload import upload
from services.step import Logits, PlanEntry, TokenReport


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Consecutive tokens of a sequence of which a step reports something."""

    seq_id: int
    start: int  # index of the first one in the sequence
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """The logits that a step has to report; nearly always none."""

    sampled: list[int] = field(default_factory=list)  # indices of sampled rows
    prompts: list[TokenRows] = field(default_factory=list)  # of the prompt, whose logits are reported
    hidden: list[TokenRows] = field(default_factory=list)  # whose hidden states are reported
    progress: list[TokenRows] = field(default_factory=list)  # of the prompt, of which only the number is reported

    def __bool__(self) -> bool:
        return bool(self.sampled or self.prompts or self.hidden or self.progress)

    @property
    def needs_residual(self) -> bool:
        """Whether rows beyond the sampled ones are needed."""
        return bool(self.prompts or self.hidden)

    def add_tokens(self, entry: PlanEntry, sequence: RequestState, first_row: int) -> None:
        """Adds what is reported of the tokens of an entry, which begin at `first_row`."""
        if sequence.token_report is TokenReport.HIDDEN_STATES:
            self.hidden.append(TokenRows(entry.seq_id, entry.position, first_row, entry.num_tokens))
            return
        num_rows = min(entry.num_tokens, sequence.spec.num_prompt_tokens - entry.position)
        if num_rows > 0:
            rows = self.prompts if sequence.token_report is TokenReport.CONTEXT_LOGITS else self.progress
            rows.append(TokenRows(entry.seq_id, entry.position, first_row, num_rows))


NO_LOGITS = WantedLogits()


@dataclass(frozen=True, slots=True)
class PendingLogits:
    """Tensors on the host that the device fills when it runs the step."""

    wanted: WantedLogits
    sampled: torch.Tensor | None  # float32 [len(wanted.sampled), vocab_size]
    prompts: torch.Tensor | None  # float32 [rows of all prompts, vocab_size]
    hidden: torch.Tensor | None  # float32 [rows of `wanted.hidden`, hidden]

    def read_sampled(self, seq_id: int, start: int, first_row: int, num_rows: int) -> Logits | None:
        """Those of `num_rows` sampled rows from `first_row` on, for output tokens from `start` on; None if unwanted."""
        if self.sampled is None or first_row not in self.wanted.sampled:
            return None
        index = self.wanted.sampled.index(first_row)
        return Logits(seq_id, start, self.sampled[index : index + num_rows].numpy())

    def read_prompts(self) -> list[Logits]:
        """What is reported of all tokens: logits, hidden states, or rows without values."""
        found = []
        for spans, values in ((self.wanted.prompts, self.prompts), (self.wanted.hidden, self.hidden)):
            end = 0
            for rows in spans:
                begin, end = end, end + rows.num_rows
                assert values is not None, "there are rows"
                found.append(Logits(rows.seq_id, rows.start, values[begin:end].numpy()))
        for rows in self.wanted.progress:
            found.append(Logits(rows.seq_id, rows.start, np.empty((rows.num_rows, 0), np.float32)))
        return found


def copy_sampled(logits: torch.Tensor, wanted: WantedLogits) -> torch.Tensor | None:
    """Copies the wanted rows of logits (float32 [num_sampled, vocab_size]) to the host."""
    if not wanted.sampled:
        return None
    return to_host(logits[upload(np.array(wanted.sampled, dtype=np.int64), logits.device)])


def copy_rows(
    backend: DenseBackend, attn_out: torch.Tensor, residual: torch.Tensor, wanted: WantedLogits, max_num_rows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Computes the logits after prompt tokens, and hidden states, and copies them to the host.

    Calls `DenseBackend.last` itself; see `PendingLogits` for the results.

    attn_out: [num_tokens, attn_size] of the last layer; residual: [num_tokens, hidden];
    max_num_rows: maximum number of rows in one call of `last`
    """
    size = min(MAX_ROWS_AT_A_TIME, max_num_rows)

    def hidden_states(rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty(len(rows), residual.shape[1], dtype=attn_out.dtype, device=attn_out.device)
        backend.last(attn_out, residual, rows, hidden)
        return hidden

    return (
        _copy(lambda rows: backend.last(attn_out, residual, rows), wanted.prompts, attn_out.device, size),
        _copy(hidden_states, wanted.hidden, attn_out.device, size),
    )


def _copy(
    compute: Callable[[torch.Tensor], torch.Tensor], spans: SequenceOf[TokenRows], device: torch.device, size: int
) -> torch.Tensor | None:
    """What `compute` gives for the rows of all spans, float32 on the host; `size` rows at a time."""
    if not spans:
        return None
    rows = np.concatenate([np.arange(each.first_row, each.first_row + each.num_rows) for each in spans])
    host: torch.Tensor | None = None
    begin = 0
    for some_rows in upload(rows, device).split(size):
        values = compute(some_rows)
        if host is None:
            shape = (len(rows), values.shape[1])
            host = torch.empty(shape, dtype=torch.float32, pin_memory=values.device.type == "cuda")
        host[begin : begin + len(some_rows)].copy_(values, non_blocking=True)
        begin += len(some_rows)
    return host
