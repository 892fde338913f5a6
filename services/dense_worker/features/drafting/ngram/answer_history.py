"""`AnswerHistory`: earlier answers of this server, in limited memory, from which drafts are copied.

Whose answers these are is a matter of privacy: from how fast an answer comes, a client could tell what it was copied
from. So a sequence copies only from answers to the same API key, and of these only from those with the same cache salt;
without keys, from answers to the same address.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.ngram.ngram_index import MIN_CAPACITY, SEPARATOR, NgramIndex

CHUNK_TOKENS = 2**14  # most tokens of one index, and of one answer; when it is full, a new one begins
_MAX_CHUNKS = 4  # of one client: a lookup takes time for each

_Owner = tuple[int, int, str]  # tenant, client and cache salt


class AnswerHistory:
    """Answers by owner; the owner that has not had an answer for longest is forgotten first."""

    def __init__(self, lengths: SequenceOf[int], max_num_tokens: int) -> None:
        """lengths: of the n-grams; max_num_tokens: of all owners, at least CHUNK_TOKENS"""
        self._lengths = lengths
        self._max_num_tokens = max_num_tokens
        self._chunks: OrderedDict[_Owner, deque[NgramIndex]] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers; small answers of an owner count as what their index takes at least."""
        return self._num_tokens

    def find(self, sequence: Sequence) -> list[NgramIndex]:
        """The texts that this sequence may copy from, the newest first."""
        return list(reversed(self._chunks.get(_owner_of(sequence), ())))

    def add(self, sequence: Sequence) -> None:
        """Adds the answer of a sequence that has ended, with the end of its prompt, after which it began."""
        owner = _owner_of(sequence)
        chunks = self._chunks.setdefault(owner, deque())
        self._chunks.move_to_end(owner)
        self._num_tokens -= _size(chunks)
        text = [*sequence.spec.prompt_token_ids[-self._lengths[-1] :], *sequence.output_token_ids]
        text = [*text[1 - CHUNK_TOKENS :], SEPARATOR]
        if not chunks or len(chunks[-1].tokens) + len(text) > CHUNK_TOKENS:
            chunks.append(NgramIndex(self._lengths))
        chunks[-1].extend(text)
        chunks[-1].note_ngrams()
        while len(chunks) > _MAX_CHUNKS:
            chunks.popleft()
        self._num_tokens += _size(chunks)
        while self._num_tokens > self._max_num_tokens and len(self._chunks) > 1:
            self._num_tokens -= _size(self._chunks.popitem(last=False)[1])
        while self._num_tokens > self._max_num_tokens and len(chunks) > 1:
            self._num_tokens -= _size([chunks.popleft()])


def _owner_of(sequence: Sequence) -> _Owner:
    return sequence.spec.tenant, 0 if sequence.spec.tenant else sequence.spec.client, sequence.spec.cache_salt


def _size(chunks: deque[NgramIndex] | list[NgramIndex]) -> int:
    return sum(max(len(chunk.tokens), MIN_CAPACITY) for chunk in chunks)
