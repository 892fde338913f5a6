"""What sequences report of their tokens, and the messages that it travels in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.common.token_logprobs import TokenLogprobs, encode_logprobs
from services.dense_worker.features.report import MAX_PART_BYTES
from services.pb import dense_pb2

_LOGPROB_BYTES = 8  # of a log-probability with its token, about
MAX_LOGITS_BYTES = 4 * 2**20  # of one message, which must fit into peers.max_message_bytes


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from index `start` on."""

    seq_id: int
    start: int  # at least 1: nothing precedes the first token
    tokens: list[TokenLogprobs]

    def encode(self) -> Iterator[tuple[dense_pb2.StepOutput, int]]:
        """Messages of about `MAX_PART_BYTES` at most, or one token; nearly always one."""
        num_bytes = _LOGPROB_BYTES * (1 + len(self.tokens[0].top))
        size = max(1, MAX_PART_BYTES // num_bytes)
        for first in range(0, len(self.tokens), size):
            tokens = [encode_logprobs(token) for token in self.tokens[first : first + size]]
            part = dense_pb2.PromptLogprobs(seq_id=self.seq_id, start=self.start + first, tokens=tokens)
            yield dense_pb2.StepOutput(prompt_logprobs=[part]), len(tokens) * num_bytes


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits, or hidden states, of consecutive tokens of a sequence, a row for each."""

    seq_id: int
    start: int  # index of the first row's token: in the prompt, or among the output tokens
    values: np.ndarray  # float32 [num_rows, vocab_size or hidden_size]; [num_rows, 0]: only their number is reported
    is_output: bool = False  # of output tokens, from which these were sampled

    def encode(self) -> Iterator[tuple[dense_pb2.StepOutput, int]]:
        """Messages of at most `MAX_LOGITS_BYTES`, or one row."""
        values = self.values
        size = max(1, MAX_LOGITS_BYTES // max(1, values[0].nbytes))
        for first in range(0, len(values), size):
            rows = values[first : first + size]
            part = dense_pb2.Logits(
                seq_id=self.seq_id, start=self.start + first, num_rows=len(rows), values=rows.tobytes()
            )
            field = "logits" if self.is_output else "prompt_logits"
            yield dense_pb2.StepOutput(**{field: [part]}), rows.nbytes
