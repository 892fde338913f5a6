"""Random steps of a `WholeModel`, whose logits are compared to the last bit with those of each sequence alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.attn_worker.layers.batch_invariant.torch_attention import BatchInvariantTorchAttention
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.batch_invariant.torch_operations import BatchInvariantTorchOperations
from services.dense_worker.model.model_weights import ModelWeights
from tests.support.dense.whole_model import WholeModel

MAX_CHUNK = 40


@dataclass(slots=True)
class Text:
    """Token ids, and the logits of every row when the text is computed alone, a token at a time."""

    token_ids: list[int]
    logits: torch.Tensor  # float32 [num_tokens, vocab_size]


@dataclass(slots=True)
class _Open:
    text: int
    length: int  # tokens computed so far
    end: int


def deterministic_model(path: Path, dtype: torch.dtype) -> WholeModel:
    """A model on the CPU as with `dense.deterministic`."""

    def make_dense(weights: ModelWeights) -> TorchBackend:
        return TorchBackend(weights, operations=BatchInvariantTorchOperations())

    return WholeModel(
        path, make_dense, make_attention=BatchInvariantTorchAttention, dtype=dtype, num_blocks=200, max_model_len=256
    )


def compute_alone(model: WholeModel, token_ids: list[int], seq_id: int = 10_000) -> Text:
    """Decodes a text that no other sequence shares a step with."""
    first = model.open(seq_id, token_ids)
    assert first == 0, "nothing of it may be cached"
    rows = [model.step((seq_id, 1, position))[0] for position in range(len(token_ids))]
    model.cache.close_sequences([seq_id])
    return Text(token_ids, torch.cat(rows))


@dataclass
class RandomSteps:
    """Opens texts in random order and computes them in random chunks, side by side.

    Sequences find each other's blocks in the prefix cache, are forked, and lose steps, which are computed again.
    """

    model: WholeModel
    texts: list[Text]
    seed: int = 0
    num_computed: int = 0  # rows that were compared
    num_cached: int = 0  # tokens that were found in the prefix cache
    _open: dict[int, _Open] = field(default_factory=dict)
    _next_id: int = 0

    def run(self, num_steps: int, max_open: int = 5) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the logits of a chunk's rows, and those of the text alone, for all chunks of each step."""
        draw = random.Random(self.seed)
        for _ in range(num_steps):
            while len(self._open) < max_open and (not self._open or draw.random() < 0.6):
                self._add(draw)
            forks, forced = self._fork(draw) if draw.random() < 0.2 else ([], [])
            chosen = draw.sample(sorted(self._open), draw.randint(1, len(self._open)))
            entries = []
            for seq_id in chosen:
                each = self._open[seq_id]
                most = min(each.end - each.length, draw.choice((1, 1, 1, 3, 8, MAX_CHUNK, 2 * MAX_CHUNK)))
                entries.append((seq_id, draw.randint(1, most), each.length))
            is_lost = not forks and draw.random() < 0.15
            results = self.model.step(*entries, forks=forks, forced=forced, is_lost=is_lost)
            for (seq_id, num_tokens, position), logits in zip(entries, results, strict=True):
                each = self._open[seq_id]
                self.num_computed += num_tokens
                yield logits, self.texts[each.text].logits[position : position + num_tokens]
                if not is_lost:
                    each.length += num_tokens
                    if each.length == each.end:
                        self.model.cache.close_sequences([seq_id])
                        del self._open[seq_id]

    def _add(self, draw: random.Random) -> None:
        seq_id, index = self._next_id, draw.randrange(len(self.texts))
        self._next_id += 1
        token_ids = self.texts[index].token_ids
        cached = self.model.open(seq_id, token_ids)
        self.num_cached += cached
        self._open[seq_id] = _Open(index, cached, len(token_ids))

    def _fork(self, draw: random.Random) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """A fork of a sequence, and the tokens behind it."""
        parent = draw.choice(sorted(self._open))
        each = self._open[parent]
        if not each.length:
            return [], []
        child, self._next_id = self._next_id, self._next_id + 1
        self._open[child] = _Open(each.text, each.length, each.end)
        following = self.texts[each.text].token_ids[each.length :]
        return [(parent, child, each.length)], [(child, token_id) for token_id in following]


def differing_rows(logits: torch.Tensor, expected: torch.Tensor) -> int:
    """The number of rows with any bit that differs."""
    left, right = (each.contiguous().view(torch.int32) for each in (logits, expected))
    return int((left != right).any(dim=1).sum())
