"""The output tensors of models that generate: of one piece of a stream, of one answer, or of all answers together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.token_logprobs import LogprobRows
from services.gateway.apis.triton.models import ModelSpec
from services.gateway.apis.triton.rows import Row
from services.gateway.apis.triton.tensors import NUMPY_TYPES, Tensor, text_tensor
from services.gateway.core.chunks import Chunk, Completion, Prompt
from services.gateway.features.token_rows import TokenRows
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.tokenizer import Tokenizer

# Outputs with one element per answer in their first dimension; others have a batch and an answer in the first two.
LISTED = ("text_output", "batch_index", "sequence_index", "num_input_tokens", "num_output_tokens")


@dataclass(frozen=True, slots=True)
class Column:
    """The same output of several answers."""

    parts: Sequence[Tensor]  # [1, ...] each; of those in `LISTED` [1]
    counts: tuple[int, int]  # of rows, and of answers to each

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Of all parts in one tensor. A long one beside many short ones makes it many times as large as they are."""
        sizes = np.max([each.shape for each in self.parts], axis=0)
        return len(self.parts), *map(int, sizes[1:])

    @property
    def num_joined_bytes(self) -> int:
        """Of that tensor, if it is another one than the only part."""
        return 0 if len(self.parts) == 1 else math.prod(self.joined_shape) * self.parts[0].values.itemsize


class Answers:
    """Belongs to one request: it counts the tokens of each answer."""

    def __init__(
        self, model: ModelSpec, rows: Sequence[Row], tokenizer: Tokenizer, pad_id: int, vocab_size: int
    ) -> None:
        """`pad_id` fills shorter answers of a batch unless the request names another token."""
        self._is_text = any(each.name == "text_output" for each in model.outputs)
        self._rows = rows
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pad_id = int(rows[0].get("pad_id", pad_id))
        self._prompts: Sequence[Sequence[int]] = ()
        self._prompt_texts: list[str] = []
        self._cum_logprobs: defaultdict[tuple[int, int], float] = defaultdict(float)

    async def begin(self, requests: Sequence[GenerationRequest], *, is_stream: bool) -> None:
        """Takes the prompt of each row. Pieces of a stream never include the prompt."""
        self._prompts = [each.spec.prompt_token_ids for each in requests]
        self._has_prompts = not is_stream
        if self._has_prompts and self._is_text:
            self._prompt_texts = [await self._tokenizer.write_text(each.text_token_ids, True) for each in requests]

    def piece(self, row_index: int, chunk: Chunk) -> list[Tensor]:
        """The outputs for new tokens of an answer; none if they do not show yet."""
        if chunk.finish is None and not (chunk.text or chunk.logprobs if self._is_text else chunk.token_ids):
            return []
        logprobs = chunk.logprobs or LogprobRows()
        outputs = self._outputs(row_index, chunk.index, chunk.text, chunk.token_ids, logprobs, chunk.reports)
        return [*outputs, *self._context_logits(row_index, chunk.prompt)]

    def answer(self, row_index: int, completion: Completion, prompt: Prompt | None) -> list[Tensor]:
        """The outputs of one whole answer. Those about the prompt are the same for all answers to it."""
        text, token_ids = completion.text, completion.token_ids
        if self._has_prompts and not self._rows[row_index].get("exclude_input_in_output"):
            token_ids = [*self._prompts[row_index], *token_ids]
            if self._is_text:
                text = self._prompt_texts[row_index] + text
        outputs = self._outputs(
            row_index, completion.index, text, token_ids, completion.logprobs, completion.reports
        )
        return [*outputs, *self._context_logits(row_index, prompt)]

    def columns(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> list[Column]:
        """Each output of all answers, grouped by row: batch first, then the answers to one row."""
        all_outputs = [
            self.answer(index, each, prompt)
            for index, (completions, prompt) in enumerate(answers)
            for each in completions
        ]
        counts = (len(answers), len(answers[0][0]))
        columns = []
        for tensors in zip(*all_outputs, strict=True):
            is_of_row = tensors[0].name == "context_logits"  # all answers to a row have the same
            columns.append(Column(tensors[:: counts[1]], (counts[0], 1)) if is_of_row else Column(tensors, counts))
        return columns

    def _outputs(
        self,
        row_index: int,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: LogprobRows,
        reports: Mapping[str, Any],
    ) -> list[Tensor]:
        row, tensors = self._rows[row_index], []
        if self._is_text:
            tensors.append(text_tensor("text_output", [text]))
        else:
            tensors.append(_int32("output_ids", [[token_ids]]))
            tensors.append(_int32("sequence_length", [[len(token_ids)]]))
        if row.get("return_log_probs"):
            values = logprobs.own
            self._cum_logprobs[row_index, index] += math.fsum(values)
            tensors.append(_float32("cum_log_probs", [[self._cum_logprobs[row_index, index]]]))
            tensors.append(_float32("output_log_probs", [[values]]))
        if row.get("return_generation_logits"):
            rows = self._rows_of(reports.get("generation_logits", ()))
            tensors.append(Tensor("generation_logits", "FP32", rows[None, None]))
        tensors.append(_int32("batch_index", [[row_index]]))
        tensors.append(_int32("sequence_index", [[index]]))
        if row.get("return_num_input_tokens"):
            tensors.append(_int32("num_input_tokens", [[len(self._prompts[row_index])]]))
        if row.get("return_num_output_tokens"):
            num_prompt_tokens = len(self._prompts[row_index]) if self._shows_prompt(row) else 0
            tensors.append(_int32("num_output_tokens", [[len(token_ids) - num_prompt_tokens]]))
        return tensors

    def _context_logits(self, row_index: int, prompt: Prompt | None) -> list[Tensor]:
        if prompt is None or not self._rows[row_index].get("return_context_logits"):
            return []
        found = prompt.reports.get("context_logits", ())  # none if the request was stopped before
        return [Tensor("context_logits", "FP32", self._rows_of(found)[None])]

    def _rows_of(self, found: TokenRows | Sequence[TokenRows]) -> np.ndarray:
        parts = [found] if isinstance(found, TokenRows) else found
        values = np.frombuffer(b"".join(part.values for part in parts), "<f4")
        return values.reshape(sum(part.num_rows for part in parts), self._vocab_size)

    def _shows_prompt(self, row: Row) -> bool:
        return self._has_prompts and not row.get("exclude_input_in_output")

    def joined(self, column: Column) -> Tensor:
        """One tensor of the same output of all answers, as long as the longest one."""
        parts, name, datatype = column.parts, column.parts[0].name, column.parts[0].datatype
        if len(parts) == 1:
            return parts[0]
        if name in LISTED:
            return Tensor(name, datatype, np.concatenate([each.values for each in parts]))
        shape = column.joined_shape
        joined = np.full(shape, self._pad_id if name == "output_ids" else 0, NUMPY_TYPES[datatype])
        for target, part in zip(joined, parts, strict=True):
            target[tuple(map(slice, part.shape[1:]))] = part.values[0]
        if name == "context_logits":
            return Tensor(name, datatype, joined)
        return Tensor(name, datatype, joined.reshape(*column.counts, *shape[2:]))


def _int32(name: str, values: Sequence[Sequence[int | Sequence[int]]]) -> Tensor:
    return Tensor(name, "INT32", np.array(values, dtype=np.int32))


def _float32(name: str, values: Sequence[Sequence[float | Sequence[float]]]) -> Tensor:
    return Tensor(name, "FP32", np.array(values, dtype=np.float32))
