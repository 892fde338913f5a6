"""`NgramIndex`: finds where the last tokens of a text occurred before. Part of the sources of drafts.

A text grows by a token in constant time, and a lookup takes constant time, however long the text is. For each length n
there is a hash table with the last place of each n-gram. Newer n-grams overwrite older ones of the same hash, so an
n-gram may be missed, and what is found is always compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd; the fractional part of the golden ratio spreads consecutive token ids well
_MIN_BITS = 10  # of a table's index
_FEW = 8  # tokens whose n-grams are faster noted one by one

SEPARATOR = 2**32 - 1  # between texts in one index; no token id
MIN_CAPACITY = 1 << _MIN_BITS  # tokens that an index has memory for from the beginning


class Match(NamedTuple):
    """Where a text goes on."""

    position: int  # of the token that followed
    length: int  # number of equal tokens before it, at least; the longest n-gram that was looked up


class NgramIndex:
    """The tokens of a text with, for each of some lengths, the place after each n-gram's last occurrence.

    A place is known only if a token follows it. Memory per token: 4 bytes, and 4 to 8 more for each length.
    """

    def __init__(self, lengths: Sequence[int], token_ids: Iterable[int] = (), num_expected_tokens: int = 0) -> None:
        """lengths: of the n-grams, rising, at least 1; num_expected_tokens: that there is memory for at once"""
        self.tokens = array("I")
        self._lengths = tuple(lengths)
        self._num_noted = 0  # tokens whose n-grams are in the tables
        self._powers = [pow(_MULTIPLIER, exponent, 2**64) for exponent in range(1, self._lengths[-1] + 1)]
        self._make_tables(max(_MIN_BITS, num_expected_tokens.bit_length()))
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens at the end. Their n-grams are noted before the next lookup, or by `note_ngrams`."""
        self.tokens.extend(token_ids)

    def note_ngrams(self) -> None:
        """Notes the n-grams of all tokens so far."""
        first, stop = self._num_noted, len(self.tokens)
        if stop > self._capacity:
            self._grow()
        elif stop - first > _FEW:
            self._insert_all(first, stop)
        else:
            for end in range(max(first, self._lengths[0]), stop):
                self._insert(end)
        self._num_noted = stop

    def find(self, recent: array[int]) -> Match | None:
        """The last place after the longest n-gram that `recent`, the last tokens of this or another text, ends with."""
        self.note_ngrams()
        return self._find_slots(recent, self._slots(recent, len(recent)))

    def find_end(self) -> Match | None:
        """The same for the end of this text itself."""
        self.note_ngrams()
        end = len(self.tokens)
        self._end_slots = end, self._slots(self.tokens, end)
        return self._find_slots(self.tokens[-self._lengths[-1] :], self._end_slots[1])

    def _find_slots(self, recent: array[int], slots: list[int]) -> Match | None:
        match, end = None, len(recent)
        for length, table, slot in zip(self._lengths, self._tables, slots, strict=False):  # a short text has fewer
            place = table[slot]
            if not place or self.tokens[place - length : place] != recent[end - length :]:
                break  # then there is no longer one
            match = Match(place, length)
        return match

    def _slots(self, tokens: array[int], end: int) -> list[int]:
        """The index in each table of the n-gram before `end`, as far as there are enough tokens."""
        powers, shift, value, begin, slots = self._powers, 64 - self._bits, 0, 0, []
        for length in self._lengths:
            if length > end:
                break
            for back in range(begin, length):
                value += tokens[end - 1 - back] * powers[back]
            begin = length
            slots.append((value & _MASK) >> shift)
        return slots

    def _insert(self, end: int) -> None:
        """Notes the n-grams before `end`."""
        looked_up, slots = self._end_slots
        if looked_up != end:
            slots = self._slots(self.tokens, end)
        for table, slot in zip(self._tables, slots, strict=False):
            table[slot] = end

    def _insert_all(self, first: int, stop: int) -> None:
        """Notes the n-grams before each of the ends [first, stop)."""
        longest = self._lengths[-1]
        for end in range(max(first, self._lengths[0]), min(longest, stop)):
            self._insert(end)
        first = max(first, longest)
        if first >= stop:
            return
        tokens = np.frombuffer(self.tokens, dtype=np.uint32)[first - longest : stop - 1].astype(np.uint64)
        ends = np.arange(first, stop, dtype=np.int32)
        values = np.zeros(len(ends), dtype=np.uint64)
        tables = dict(zip(self._lengths, self._tables, strict=True))
        for back in range(longest):
            values += tokens[longest - 1 - back : len(tokens) - back] * np.uint64(self._powers[back])
            if (table := tables.get(back + 1)) is not None:
                # Of equal indices the last one counts.
                np.frombuffer(table, dtype=np.int32)[values >> np.uint64(64 - self._bits)] = ends

    def _make_tables(self, bits: int) -> None:
        self._end_slots: tuple[int, list[int]] = 0, []  # the last end that was looked up, and its slots
        self._bits, self._capacity = bits, 1 << bits
        self._tables = [array("i", bytes(4 << bits)) for _ in self._lengths]  # 0: no place

    def _grow(self) -> None:
        """Larger tables, at least twice as large as the text: that takes constant time per token in the long run."""
        self._make_tables(len(self.tokens).bit_length() + 1)
        self._insert_all(0, len(self.tokens))
