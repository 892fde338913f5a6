"""`Grammars`: makes the matcher of each sequence with structured output, in threads, none of it on the engine thread.

The gateway has tried each grammar before, in a process of its own. What still fails here fails one sequence. Clients
take turns, so nobody waits for all the expensive grammars of another client.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from services.common.errors import InvalidRequest
from services.common.fairness import ClientTurns
from services.common.structured_output import StructuredOutput
from services.grammar.grammar_error import GrammarError
from services.grammar.lower import lower
from services.grammar.matcher import CREDIT_S, GrammarMatcher, MaskThreads, compile_grammar
from services.grammar.vocabulary import Vocabulary
from services.step import SequenceSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_THREADS = 2
NICENESS = 5  # of the threads that compile: with few cores, many new grammars would make steps several times as long
MAX_KEPT = 64  # compiled grammars
MAX_KEPT_BYTES = 4 * 2**20  # of their texts: compiled they take 20 to 145 times as much by what was measured
# Threads that find masks that take long, at most half of the cores: attention worker and gateway run beside them.
MAX_MASK_THREADS = 8
# One thread at a time uses a lexer. So of more sequences of a form the next ones get another lexer, and at most as many
# lexers as there are threads; it learns as fast as the first one.
MAX_SHARING = 8
MAX_AGAIN_S = 0.05  # to compile a form takes at most so long if it is compiled for another lexer


@dataclass(frozen=True, slots=True, eq=False)
class _Lexer:
    start: LLMatcher  # whose copies share the lexer
    matchers: WeakSet[GrammarMatcher]  # that began with such a copy


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    lexers: list[_Lexer]  # at least one
    grammar: str
    compile_s: float  # of processor time


class Grammars:
    """Compiled grammars by their values. Call `begin`, if the vocabulary is to be ready before the first sequence, and
    finally `close`, which ends the threads.

    A thread begins with the priority of the one that starts it. A standby calls `begin` at low priority, at which
    only the vocabulary is read: all other threads start when a sequence first needs them. Those that find masks have
    the event loop's priority, since steps wait for them.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], num_mask_threads: int | None = None) -> None:
        """`num_mask_threads`: that find masks that take long; None: as many as suit the machine."""
        num_cores = os.cpu_count() or 1
        self._num_mask_threads = num_mask_threads or min(MAX_MASK_THREADS, num_cores // 2)
        self._read_vocabulary = read_vocabulary
        self._loaded: Future[tuple[Vocabulary, LLTokenizer]] | None = None  # None: not begun
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", os.nice, (NICENESS,))
        self._turns = ClientTurns(NUM_THREADS)
        self._mask_threads: MaskThreads | None = None  # event loop
        self._lock = threading.Lock()  # of all below
        self._kept: OrderedDict[StructuredOutput, _Compiled] = OrderedDict()  # the least recently used first
        self._num_bytes = 0

    def begin(self) -> Future[tuple[Vocabulary, LLTokenizer]]:
        """Begins to read the vocabulary, unless that has begun, which takes the lock for tenths of a second."""
        with self._lock:
            if self._loaded is None:
                reading = ThreadPoolExecutor(1, thread_name_prefix="grammar")
                self._loaded = reading.submit(_load, self._read_vocabulary)
                reading.shutdown(wait=False)  # it ends when it has read
            return self._loaded

    async def make(self, spec: SequenceSpec, output_token_ids: SequenceOf[int]) -> GrammarMatcher:
        """The matcher of a sequence whose output has a grammar; it has followed the output so far.

        Raises `InvalidRequest` if the grammar cannot be compiled.
        """
        async with self._turns.turn(spec.client_id):
            loop, mask_threads = asyncio.get_running_loop(), self._find_mask_threads()
            return await loop.run_in_executor(self._threads, self._make, spec, output_token_ids, mask_threads)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._mask_threads is not None:
            self._mask_threads.close()

    def _make(
        self, spec: SequenceSpec, output_token_ids: SequenceOf[int], mask_threads: MaskThreads | None
    ) -> GrammarMatcher:
        structure = spec.sampling.structured_output
        assert structure is not None, "only a sequence with structured output has a grammar"
        try:
            vocabulary, tokenizer = self.begin().result()
            kept = self._find(structure) or self._compile(structure, tokenizer, vocabulary)
            lexer = self._choose_lexer(kept, tokenizer)
            grammar = self._follow(spec, output_token_ids, lexer, vocabulary, mask_threads)
            if grammar.error is not None:  # perhaps because other sequences have used up the states of the lexer
                self._forget(structure, kept)
                kept = self._compile(structure, tokenizer, vocabulary)
                grammar = self._follow(spec, output_token_ids, kept.lexers[0], vocabulary, mask_threads)
        except GrammarError as error:
            raise InvalidRequest(f"{structure.field_name} cannot be used: {error}", structure.field_name) from error
        if kept.compile_s <= CREDIT_S:  # the engine waits for it
            grammar.remake = partial(self._make_again, structure, kept, tokenizer)
        return grammar

    def _make_again(self, structure: StructuredOutput, used_up: _Compiled, tokenizer: LLTokenizer) -> LLMatcher:
        """For a sequence whose lexer has too many states: 10 to 25 MB, which go with the sequences that share it."""
        self._forget(structure, used_up)
        return compile_grammar(tokenizer, used_up.grammar)

    def _follow(
        self,
        spec: SequenceSpec,
        output_token_ids: SequenceOf[int],
        lexer: _Lexer,
        vocabulary: Vocabulary,
        mask_threads: MaskThreads | None,
    ) -> GrammarMatcher:
        may_end = any(token_id in vocabulary.eos_token_ids for token_id in spec.stop_token_ids)
        with self._lock:  # it copies the start
            grammar = GrammarMatcher(lexer.start, mask_threads, vocabulary, may_end)
            lexer.matchers.add(grammar)
        grammar.sync(output_token_ids)
        grammar.warm_up()
        return grammar

    def _choose_lexer(self, kept: _Compiled, tokenizer: LLTokenizer) -> _Lexer:
        """The lexer of a form that the fewest sequences share, or another one."""
        with self._lock:
            least = min(kept.lexers, key=lambda each: len(each.matchers))
            has_most = len(kept.lexers) >= self._num_mask_threads
            if len(least.matchers) < MAX_SHARING or has_most or kept.compile_s > MAX_AGAIN_S:
                return least
            for each in self._kept.values():  # those that nobody uses any more
                each.lexers[1:] = [lexer for lexer in each.lexers[1:] if len(lexer.matchers)]
        start = compile_grammar(tokenizer, kept.grammar)
        start.compute_bitmask()
        with self._lock:
            if len(kept.lexers) < self._num_mask_threads:  # another thread may have added one meanwhile
                kept.lexers.append(_Lexer(start, WeakSet()))
            return kept.lexers[-1]

    def _find_mask_threads(self) -> MaskThreads | None:
        from llguidance import LLExecutor

        if self._mask_threads is None and self._num_mask_threads > 1:
            self._mask_threads = MaskThreads(LLExecutor(self._num_mask_threads), self._num_mask_threads)
        return self._mask_threads

    def _find(self, structure: StructuredOutput) -> _Compiled | None:
        with self._lock:
            if structure in self._kept:
                self._kept.move_to_end(structure)
            return self._kept.get(structure)

    def _compile(self, structure: StructuredOutput, tokenizer: LLTokenizer, vocabulary: Vocabulary) -> _Compiled:
        begin = time.thread_time()
        grammar = lower(structure, vocabulary.special_tokens)
        start = compile_grammar(tokenizer, grammar)
        compiled = _Compiled([_Lexer(start, WeakSet())], grammar, time.thread_time() - begin)
        start.compute_bitmask()  # so that its copies find their first masks fast
        with self._lock:
            if structure not in self._kept:
                self._kept[structure] = compiled
                self._num_bytes += structure.num_bytes
            while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
                self._num_bytes -= self._kept.popitem(last=False)[0].num_bytes
            return compiled

    def _forget(self, structure: StructuredOutput, compiled: _Compiled) -> None:
        with self._lock:
            if self._kept.get(structure) is compiled:  # another thread may have replaced it already
                del self._kept[structure]
                self._num_bytes -= structure.num_bytes


def _load(read_vocabulary: Callable[[], Vocabulary]) -> tuple[Vocabulary, LLTokenizer]:
    vocabulary = read_vocabulary()
    return vocabulary, vocabulary.load()
