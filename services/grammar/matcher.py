"""`GrammarMatcher`: where one sequence is in its grammar, and which tokens may come next.

Nothing here raises because of a grammar: a matcher that fails says why in `error`, and the sequence ends with it.
Copies of one llguidance matcher share their lexer, so one sequence can use up its states for all others of the same
grammar. Each of these then makes a lexer of its own, once (`remake`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from services.grammar.grammar_error import GrammarError
from services.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

MAX_ERROR_CHARACTERS = 300
PARALLEL_S = 0.002  # what the masks of a step would take one thread; for less, waking other threads takes longer
TOKEN_S = 0.005  # what a sequence may take of its steps for each token, in the mean
CREDIT_S = 0.25  # what it may take beyond that
QUICK_S = TOKEN_S / 10  # following a token costs nothing if it takes less
FOLLOWED_AT_ONCE = 32  # tokens with a new lexer, between two looks at the clock
_EXCERPT = re.compile(r"\n +\d+ \| ")  # of the grammar, which clients do not know, follows a message
_ALL = 0xFFFFFFFF  # a word of a mask that allows all its tokens


def limits() -> LLParserLimits:
    """Bounds of time and memory, in llguidance's units. A mask within them takes a few milliseconds at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,  # 1 to 2 kB each, for every sequence
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of its grammar. Raises `GrammarError`. Releases the interpreter lock."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise GrammarError(describe_error(matcher))
    if matcher.is_stopped():
        raise GrammarError("no text but the empty one has this form")
    return matcher


def describe_error(matcher: LLMatcher) -> str:
    """llguidance's message without its own state and without the grammar, shortened."""
    message = _EXCERPT.split(matcher.get_error(), maxsplit=1)[0]
    message = message.partition("\n<")[0].partition(" <non-verbose/>")[0].strip()
    if message.startswith("NoExtension"):
        message = "no further token of the vocabulary fits the form"
    if message.startswith("panic"):
        message = "the compiler cannot handle it"
    if "coerce_one_of" in message:  # an option by which answers would not be valid
        message = "oneOf can be enforced only where no value can be valid against two of its schemas; try anyOf"
    return " ".join(message.split())[:MAX_ERROR_CHARACTERS]


@dataclass(frozen=True, slots=True)
class MaskThreads:
    """Threads that find the masks of a step together, without the interpreter lock."""

    executor: LLExecutor
    num_threads: int


class GrammarMatcher:
    """Belongs to one sequence, whose output it follows. After its construction, used on the engine thread only."""

    def __init__(self, start: LLMatcher, threads: MaskThreads | None, vocabulary: Vocabulary, may_end: bool) -> None:
        """`start` is at the beginning of the grammar and stays there. `may_end`: EOS ends the sequence.

        `threads` are for masks that take long; None: the caller's thread makes them all.
        """
        self.error: str | None = None  # why no further token can be found
        self.remake: Callable[[], LLMatcher] | None = None  # makes another start, with a lexer of its own; None: cannot
        self.num_words = -(-vocabulary.num_tokens // 32)  # of 32 bits, in a mask
        self._start = start
        self._threads = threads
        self._eos_token_ids = vocabulary.eos_token_ids
        self._may_end = may_end
        self._matcher = start.deep_copy()
        self._consumed: list[int] = []
        self._credit_s = CREDIT_S
        self._mask_s = 0.0  # that its last mask took
        self._is_slow = False  # perhaps: one of a step whose masks took longer than they would have
        self._forced: list[int] | None = None  # see `forced_tokens`; None: not looked up since the last token

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self.error is None and self._matcher.is_stopped()

    @property
    def is_running(self) -> bool:
        """Whether there are further tokens to choose."""
        return self.error is None and not self._matcher.is_stopped()

    @property
    def forced_tokens(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice: the mask of each allows only this token."""
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens() if self.is_running else []
        return self._forced

    def sync(self, output_token_ids: Sequence[int]) -> None:
        """Makes it follow exactly these tokens. Costs time for tokens that it has not consumed, as after a crash."""
        token_ids = list(output_token_ids)
        if self._consumed != token_ids[: len(self._consumed)]:
            self._matcher, self._consumed, self.error = self._start.deep_copy(), [], None
            self._forced = None
        missing = token_ids[len(self._consumed) :]
        if missing and self.is_running:
            self._matcher.consume_tokens(missing)
            self._note(missing)

    def warm_up(self) -> None:
        """Finds the next tokens once, off the engine thread: the first time takes longest."""
        if self.is_running:
            self._matcher.compute_bitmask()
            self._note([])

    def _note(self, token_ids: Sequence[int]) -> None:
        self._consumed += token_ids
        self._forced = self._forced if not token_ids else None
        if self._matcher.is_error():
            self._recover()

    def _limit_recovery(self, begin_s: float) -> None:
        """Before `_note` or `_recover`: no lexer of its own if those of this step's other sequences took too long."""
        if self._matcher.is_error() and time.thread_time() - begin_s > CREDIT_S:
            self.remake = None

    def _recover(self) -> None:
        """After an error: follows the same tokens with a lexer of its own. Sets `error` if that fails, too.

        The caller charges the sequence for it.
        """
        remake, self.remake = self.remake, None
        if remake is not None:
            begin = time.thread_time()
            try:
                self._start = remake()
            except GrammarError as error:
                self.error = str(error)
                return
            self._matcher, self._forced = self._start.deep_copy(), None
            for first in range(0, len(self._consumed), FOLLOWED_AT_ONCE):
                self._matcher.consume_tokens(self._consumed[first : first + FOLLOWED_AT_ONCE])
                if time.thread_time() - begin > CREDIT_S:
                    self.error = (
                        f"it took more than {1e3 * CREDIT_S:.0f} ms to follow {len(self._consumed)} tokens again"
                    )
                    return
        if self._matcher.is_error():
            self.error = describe_error(self._matcher)

    def _charge(self, took_s: float) -> None:
        """Counts the time of a mask, which all sequences of a step wait for. A sequence that takes too much ends."""
        self._mask_s = took_s
        self._is_slow = took_s > TOKEN_S
        if self._is_slow:
            self.remake = None  # it uses up the states itself, and would take long again
        self._credit_s = min(CREDIT_S, self._credit_s + TOKEN_S - took_s)
        if self._credit_s < 0 and self.error is None:
            self.error = (
                f"the tokens that may follow {len(self._consumed)} tokens took {1e3 * took_s:.0f} ms to find, at most "
                f"{1e3 * TOKEN_S:.0f} ms allowed in the mean"
            )

    def _charge_token(self, took_s: float) -> None:
        if took_s > QUICK_S:
            self._credit_s -= took_s
            self._is_slow = True  # so that its next mask is timed alone, and ends it if it has no credit left

    def _fill_forced(self, masks: np.ndarray) -> None:
        """Sets the masks of its next tokens, which are all forced."""
        if not self.is_running:
            return
        assert len(masks) <= len(self.forced_tokens), "drafts of a form are its forced tokens but the last"
        masks.fill(0)
        for mask, token_id in zip(masks, self.forced_tokens, strict=False):
            mask[token_id >> 5] = 1 << (token_id & 31)

    @staticmethod
    def consume(sampled: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Each running matcher takes the token of its sequence. One that needs long is charged for its share."""
        begin_s, times = time.thread_time(), [time.perf_counter()]  # the former takes as long to read as a token
        for matcher, token_id in sampled:
            if matcher.is_running:
                matcher._matcher.consume_token(token_id)  # 2 µs: other threads would not be faster
                matcher._limit_recovery(begin_s)
                matcher._note([token_id])
            times.append(time.perf_counter())
        took_s = time.thread_time() - begin_s
        if took_s > QUICK_S:
            for (matcher, _), start, end in zip(sampled, times, times[1:], strict=False):
                matcher._charge_token(took_s * (end - start) / (times[-1] - times[0]))

    @staticmethod
    def fill_masks(matchers: Sequence[GrammarMatcher], masks: np.ndarray) -> None:
        """Sets the bit of every token that may come next. A matcher that does not run allows all.

        A matcher may have several consecutive rows, at most as many as forced tokens: one for each of them. The
        matchers belong to one model. Masks that will take long are found by several threads, without the interpreter
        lock.
        masks: uint32 [len(matchers), num_words], contiguous; at least the matchers' `num_words`
        """
        masks.fill(_ALL)
        running, row = list[tuple[int, GrammarMatcher]](), 0
        for _, group in groupby(matchers, key=id):
            matcher, *more = group
            if more:
                matcher._fill_forced(masks[row : row + 1 + len(more)])
            elif matcher.is_running:
                running.append((row, matcher))
            row += 1 + len(more)
        _find_masks(running, masks)
        _recover_all([(i, each) for i, each in running if each._matcher.is_error()], masks)
        for i, each in running:
            if each.error is not None:
                masks[i] = _ALL
        if endless := [i for i, each in running if not each._may_end and each.error is None]:
            _forbid_eos(masks, endless, running[0][1]._eos_token_ids)


def _recover_all(failed: list[tuple[int, GrammarMatcher]], masks: np.ndarray) -> None:
    """Finds the masks of matchers that have failed with lexers of their own, and charges each for its own."""
    begin_s = time.thread_time() if failed else 0.0
    for i, each in failed:
        recovery_s = time.thread_time()
        each._limit_recovery(begin_s)
        each._recover()
        each._credit_s -= time.thread_time() - recovery_s
        if each.is_running:
            _find_masks([(i, each)], masks)
            each._note([])


def _find_masks(running: list[tuple[int, GrammarMatcher]], masks: np.ndarray) -> None:
    """Has llguidance write the masks of matchers, each into its row of `masks`, and charges them for the time."""
    alone, threads = running, running[0][1]._threads if running else None
    together = [(i, each) for i, each in running if not each._is_slow]
    if threads is not None and len(together) > 1 and sum(each._mask_s for _, each in together) > PARALLEL_S:
        alone = [(i, each) for i, each in running if each._is_slow]
        _find_together(together, masks, threads)
    for i, each in alone:
        begin = time.thread_time()
        each._matcher.unsafe_compute_mask_ptr(masks.ctypes.data + i * masks.strides[0], masks.strides[0])
        each._charge(time.thread_time() - begin)


def _find_together(matchers: list[tuple[int, GrammarMatcher]], masks: np.ndarray, threads: MaskThreads) -> None:
    """One call for many masks, whose own times stay unknown. If it takes too long, each is timed in the next step."""
    expected_s = sum(each._mask_s for _, each in matchers) / threads.num_threads
    rows = [(each._matcher, i) for i, each in matchers]
    begin = time.monotonic()
    threads.executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
    took_s = time.monotonic() - begin
    mask_s = took_s * threads.num_threads / len(matchers)
    is_slow = mask_s > TOKEN_S or took_s > max(TOKEN_S, 2 * expected_s)
    for _, each in matchers:
        each._mask_s, each._is_slow = mask_s, is_slow


def _forbid_eos(masks: np.ndarray, rows: Sequence[int], eos_token_ids: Sequence[int]) -> None:
    """Takes EOS out of these rows of masks; a row in which nothing else is keeps it."""
    words_and_bits = [(token_id >> 5, 1 << (token_id & 31)) for token_id in eos_token_ids]
    with_eos = {row for word, bit in words_and_bits for row in (masks[:, word] & bit).nonzero()[0].tolist()}
    for mask in (masks[row] for row in with_eos.intersection(rows)):
        kept = [(word, mask[word]) for word, _ in words_and_bits]
        for word, bit in words_and_bits:
            mask[word] &= _ALL ^ bit
        if not mask.any():
            for word, bits in kept:
                mask[word] = bits
