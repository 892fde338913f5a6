"""`GrammarMatcher`: where one sequence is in its grammar, and which tokens may come next.

Nothing here raises because of a grammar: a matcher that fails says why in `error`, and the sequence ends with it.
Copies of one llguidance matcher share their lexer: one thread uses it at a time, and one sequence can use up its states
for the others. Each of these then makes a lexer of its own, once (`remake`).
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from services.grammar.grammar_error import GrammarError
from services.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

MAX_ERROR_CHARACTERS = 300
# For so long a caller of `find_ahead` waits until the other thread has begun: else it would keep the interpreter lock,
# mostly for a millisecond or two. Not longer, as that thread may be finding other masks.
HANDOVER_S = 0.001
AHEAD_S = 0.0002  # what the masks of a step would take one thread; for less, no other one finds them ahead
PARALLEL_S = 0.002  # what the masks of a step would take one thread; for less, waking other threads takes longer
TOKEN_S = 0.005  # what a sequence may take of its steps for each token, in the mean
CREDIT_S = 0.25  # what it may take beyond that
QUICK_S = TOKEN_S / 10  # following a token costs nothing if it takes less
FOLLOWED_AT_ONCE = 32  # tokens with a new lexer, between two looks at the clock
# Matchers whose forced tokens are looked up before their masks are found; of more, masks tell which have any.
MAX_LOOKED_UP = 16
MAX_FORCED_AT_ONCE = 512  # tokens; to find them takes as long as all that is forced then is
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


class MaskThreads:
    """Threads that find the masks of a step together: those of `executor` without the interpreter lock.

    Those of `timing` time each mask. `ahead` waits for the others, while the engine thread goes on.
    """

    def __init__(self, executor: LLExecutor, num_threads: int) -> None:
        self.executor, self.num_threads = executor, num_threads
        self.timing = ThreadPoolExecutor(num_threads, "timed-masks")
        self.ahead = ThreadPoolExecutor(1, "masks-ahead")

    def close(self) -> None:
        """Ends the threads of Python; those of `executor` end with it."""
        for each in (self.ahead, self.timing):
            each.shutdown(wait=False, cancel_futures=True)


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
        self._mask_s = 0.0  # that its last mask took, or would have taken one thread
        self._wait_s = 0.0  # its part of what the masks of that step took: less if threads found them side by side
        self._token_s = 0.0  # that following its last token took
        self._forced_s = 0.0  # that looking for forced tokens took the last time
        self._is_slow = False  # perhaps: one of a step whose masks took longer than they would have
        self._forced: list[int] | None = None  # see `forced_tokens`; None: not looked up
        self._after_forced = self._matcher  # another one, which has followed these; valid while `_forced` is
        self._has_looked = False  # whether `forced_tokens` has been asked for since the last token
        self._ahead: _MasksAhead | None = None  # has its next mask, or will
        self._finds_forced = True  # until its lexer fails: what is found uses up the states of one

    @property
    def step_s(self) -> float:
        """What it took of its last step, for which all sequences of that step waited."""
        return self._wait_s + self._token_s + self._forced_s

    @property
    def has_found(self) -> bool:
        """Whether no other thread is still finding its next mask."""
        return self._ahead is None or self._ahead.is_found

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        self._await_mask()
        return self.error is None and self._matcher.is_stopped()

    @property
    def is_running(self) -> bool:
        """Whether there are further tokens to choose."""
        if self._ahead is not None:
            self._await_mask()
        return self.error is None and not self._matcher.is_stopped()

    @property
    def forced_tokens(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice and a further token follows; of many, not all.

        The mask of each allows only this token. The last token of a text is never among them: it is sampled, as the one
        after these is. Looked up when those found before have been consumed; the sequence is charged for it.
        """
        self._has_looked = True
        if self._forced is None:
            is_known = self.is_running and self._ahead is not None and not self._ahead.allows_one(self)
            self._forced = [] if is_known else self._look_up_forced()
        return self._forced

    def _look_up_forced(self) -> list[int]:
        begin_s = time.thread_time()
        forced = self._find_forced() if self.is_running and self._finds_forced else []
        self._forced_s = time.thread_time() - begin_s
        self._charge_token(self._forced_s)
        return forced

    def _find_forced(self) -> list[int]:
        forced = self._matcher.compute_ff_tokens()[:MAX_FORCED_AT_ONCE]
        if not forced:
            return forced
        self._after_forced = self._matcher.deep_copy()
        self._after_forced.consume_tokens(forced[:-1])
        after_last = self._after_forced.deep_copy()
        after_last.consume_token(forced[-1])
        if after_last.is_stopped():  # the text is complete, or cannot be followed that far
            return forced[:-1] if not self._after_forced.is_error() else []
        self._after_forced = after_last
        return forced

    def sync(self, output_token_ids: Sequence[int]) -> None:
        """Makes it follow exactly these tokens. Costs time for tokens that it has not consumed, as after a crash."""
        self._await_mask()
        token_ids = list(output_token_ids)
        if self._consumed != token_ids[: len(self._consumed)]:
            self._matcher, self._consumed, self.error = self._start.deep_copy(), [], None
            self._forced = self._ahead = None
        missing = token_ids[len(self._consumed) :]
        if missing and self.is_running:
            self._matcher.consume_tokens(missing)
            self._note(missing)
            self._check()

    def warm_up(self) -> None:
        """Finds the next tokens once, off the engine thread: the first time takes longest."""
        if self.is_running:
            begin_s = time.thread_time()
            self._matcher.compute_bitmask()
            self._mask_s = self._wait_s = time.thread_time() - begin_s
            self._check()
            if self.forced_tokens:
                self._credit_s, self._is_slow = CREDIT_S, False  # no step has waited

    def _await_mask(self) -> None:
        """While its mask is being found, llguidance's matcher can be used for nothing else."""
        if (ahead := self._ahead) is None:
            return
        if not ahead.is_over:
            ahead.wait()
        if ahead.has_failed and self.error is None and self._matcher.is_error():  # it is not at its end
            begin_s = time.thread_time()
            if ahead.recovery_s > CREDIT_S:
                self.remake = None
            self._recover(self._matcher)
            recovery_s = time.thread_time() - begin_s
            self._credit_s -= recovery_s
            ahead.recovery_s += recovery_s

    def _note(self, token_ids: list[int]) -> None:
        """Its matcher has consumed these, or has failed. `_check` follows, unless it has not."""
        self._consumed += token_ids
        self._ahead = None
        if self._forced is not None:
            num_tokens = len(token_ids)
            is_as_forced = len(self._forced) > num_tokens and self._forced[:num_tokens] == token_ids
            self._forced = self._forced[num_tokens:] if is_as_forced else None

    def _check(self) -> None:
        if self._matcher.is_error():
            self._recover(self._matcher)

    def _limit_recovery(self, begin_s: float) -> None:
        """After an error, before `_recover`: no lexer of its own if those of this step's others took too long."""
        if time.thread_time() - begin_s > CREDIT_S:
            self.remake = None

    def _recover(self, failed: LLMatcher) -> None:
        """After an error: follows the same tokens with a lexer of its own. Sets `error` if that fails, too.

        The caller charges the sequence for it. `failed`: that has the error, see `_state_after`
        """
        remake, self.remake = self.remake, None
        if remake is None:
            self.error = describe_error(failed)
            return
        begin = time.thread_time()
        try:
            self._start = remake()
        except GrammarError as error:
            self.error = str(error)
            return
        self._matcher, self._forced, self._finds_forced = self._start.deep_copy(), None, False
        self._ahead = None
        for first in range(0, len(self._consumed), FOLLOWED_AT_ONCE):
            self._matcher.consume_tokens(self._consumed[first : first + FOLLOWED_AT_ONCE])
            if time.thread_time() - begin > CREDIT_S:
                self.error = f"it took more than {1e3 * CREDIT_S:.0f} ms to follow {len(self._consumed)} tokens again"
                return
        if self._matcher.is_error():
            self.error = describe_error(self._matcher)

    def _charge(self, took_s: float) -> None:
        """Counts the time of a mask, which all sequences of a step wait for. A sequence that takes too much ends."""
        self._mask_s = self._wait_s = took_s
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
        """Sets the masks of its next tokens, which are all forced. These cost nothing."""
        masks.fill(0)
        for mask, token_id in zip(masks, self.forced_tokens, strict=False):
            mask[token_id >> 5] = 1 << (token_id & 31)
        self._credit_s = min(CREDIT_S, self._credit_s + TOKEN_S * len(masks))

    def _state_after(self, num_forced: int) -> LLMatcher:
        """What finds the tokens after so many forced ones: none, or all."""
        if not num_forced:
            return self._matcher
        assert num_forced == len(self.forced_tokens), "between two forced tokens there is nothing to find"
        return self._after_forced

    @staticmethod
    def consume(sampled: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Each running matcher takes the token of its sequence. One that needs long is charged for its share."""
        begin_s, clock = time.thread_time(), time.perf_counter  # the former takes as long to read as a token
        times = [clock()]
        for matcher, token_id in sampled:
            if matcher.is_running:
                has_failed = not matcher._matcher.consume_token(token_id)  # 2 µs: other threads would not be faster
                matcher._note([token_id])
                if has_failed:
                    matcher._limit_recovery(begin_s)
                    matcher._check()
            matcher._token_s = 0.0
            times.append(clock())
        took_s = time.thread_time() - begin_s
        if took_s > QUICK_S:
            for (matcher, _), start, end in zip(sampled, times, times[1:], strict=False):
                matcher._token_s = took_s * (end - start) / (times[-1] - times[0])
                matcher._charge_token(matcher._token_s)

    @staticmethod
    def find_ahead(matchers: Sequence[GrammarMatcher]) -> None:
        """Begins to find the masks of the next tokens in other threads, if that takes long. `fill_masks` uses them.

        What drafting looks at each time is looked up before, so that it need not wait for them, unless that takes long.
        matchers: that run
        """
        if not matchers or (threads := matchers[0]._threads) is None:
            return
        if sum([each._mask_s for each in matchers]) < AHEAD_S:
            return
        if len(matchers) <= MAX_LOOKED_UP:
            for each in matchers:
                if each._has_looked and each._forced is None:
                    each._forced = each._look_up_forced()
                each._has_looked = False
        rows = [each for each in matchers if not each._forced]
        if len(rows) > 1:
            ahead = _MasksAhead(rows, threads)
            for each in rows:
                each._ahead = ahead

    @staticmethod
    def fill_masks(matchers: Sequence[GrammarMatcher], masks: np.ndarray) -> None:
        """Sets the bit of every token that may come next. A matcher that does not run allows all.

        A matcher may have several consecutive rows, at most one more than forced tokens: one for each of these, and
        then one for the token after them. The matchers belong to one model. Masks that will take long are found by
        several threads, without the interpreter lock.
        masks: uint32 [len(matchers), num_words], contiguous; at least the matchers' `num_words`
        """
        ahead = matchers[0]._ahead
        if ahead is not None and ahead.copy_all(matchers, masks):  # as in most steps of many
            running = range(len(matchers))
        else:
            running = GrammarMatcher._fill_one_by_one(matchers, masks)
        if endless := [row for row in running if not matchers[row]._may_end]:
            _forbid_eos(masks, endless, matchers[0]._eos_token_ids)

    @staticmethod
    def _fill_one_by_one(matchers: Sequence[GrammarMatcher], masks: np.ndarray) -> list[int]:
        """The same with EOS where a form may end. Returns the rows of matchers that run which are not forced."""
        masks.fill(_ALL)
        rows, first = list[_Row](), 0
        for _, group in groupby(matchers, key=id):
            matcher, *more = group
            last = first + len(more)
            if matcher.is_running:
                num_forced = min(len(more) + 1, len(matcher.forced_tokens)) if more else 0
                if num_forced:
                    matcher._fill_forced(masks[first : first + num_forced])
                if num_forced == len(more):
                    rows.append(_Row(last, matcher, matcher._state_after(num_forced)))
                assert num_forced >= len(more), "drafts of a form are its forced tokens"
            first = last + 1
        _find_masks(_without_found(rows, masks), masks)
        _recover_all([row for row in rows if row.state.is_error()], masks)
        for row in rows:
            if row.matcher.error is not None:
                masks[row.index] = _ALL
        return [row.index for row in rows if row.matcher.error is None]


class _Row(NamedTuple):
    """A mask that must be found."""

    index: int
    matcher: GrammarMatcher
    state: LLMatcher  # the matcher's own, or that after its forced tokens


class _MasksAhead:
    """The next masks of matchers, found by other threads.

    `masks`: uint32 [len(matchers), num_words]; None when a step has taken them: those that were not in that step find
    theirs again, so that no sequence that pauses holds the masks of all.
    """

    def __init__(self, matchers: list[GrammarMatcher], threads: MaskThreads) -> None:
        import numpy as np

        self.is_over = False  # whether somebody has waited until they were found
        self.has_failed = False  # whether any could not be found
        self.recovery_s = 0.0  # that new lexers took, for those whose lexer had too many states
        self.masks: np.ndarray | None = np.empty((len(matchers), matchers[0].num_words), dtype=np.uint32)
        self.rows = {id(each): row for row, each in enumerate(matchers)}  # it keeps no lexer of another matcher
        has_begun = threading.Event()
        self._found: Future[None] = threads.ahead.submit(self._find, matchers, self.masks, has_begun)
        has_begun.wait(HANDOVER_S)

    def _find(self, matchers: list[GrammarMatcher], masks: np.ndarray, has_begun: threading.Event) -> None:
        has_begun.set()
        rows = [_Row(row, each, each._matcher) for row, each in enumerate(matchers)]
        _find_masks(rows, masks, is_ahead=True)
        self.has_failed = any([row.state.is_error() for row in rows])
        greatest = masks.max(axis=1)
        self._allows_one = ((masks != 0).sum(axis=1, dtype="int16") == 1) & (greatest & (greatest - 1) == 0)

    def allows_one(self, matcher: GrammarMatcher) -> bool:
        """Whether the mask of a matcher, which has been awaited, allows a single token, as where one is forced."""
        return bool(self._allows_one[self.rows[id(matcher)]])

    def copy_all(self, matchers: Sequence[GrammarMatcher], masks: np.ndarray) -> bool:
        """Takes the masks, if they are those of just these matchers in their order. Returns whether."""
        if [id(each) for each in matchers] != list(self.rows) or not all([each._ahead is self for each in matchers]):
            return False
        self.wait()
        if self.masks is None or self.has_failed:
            return False
        masks[:, : self.masks.shape[1]] = self.masks
        masks[:, self.masks.shape[1] :] = _ALL
        self.masks = None
        return True

    @property
    def is_found(self) -> bool:
        return self._found.done()

    def wait(self) -> None:
        self._found.result()
        self.is_over = True


def _without_found(rows: list[_Row], masks: np.ndarray) -> list[_Row]:
    """Writes the masks that have been found ahead, each into its row of `masks`; returns the other rows."""
    used, others = dict[_MasksAhead, list[_Row]](), list[_Row]()
    for row in rows:
        ahead = row.matcher._ahead
        if ahead is not None and ahead.masks is not None:
            of_ahead = used.setdefault(ahead, [])
            if row.state is row.matcher._matcher:  # the mask after its forced tokens is another one
                of_ahead.append(row)
                continue
        others.append(row)
    for ahead, found in used.items():
        ahead.wait()
        indexes, rows_ahead = [row.index for row in found], [ahead.rows[id(row.matcher)] for row in found]
        masks[indexes, : ahead.masks.shape[1]] = ahead.masks[rows_ahead]
        ahead.masks = None
    return others


def _recover_all(failed: list[_Row], masks: np.ndarray) -> None:
    """Finds the masks of matchers that have failed with lexers of their own, and charges each for its own."""
    begin_s = time.thread_time() if failed else 0.0
    for index, each, state in failed:
        recovery_s = time.thread_time()
        num_forced = len(each.forced_tokens) if state is each._after_forced else 0
        each._limit_recovery(begin_s)
        each._recover(state)
        each._credit_s -= time.thread_time() - recovery_s
        if each.is_running and num_forced and len(each.forced_tokens) != num_forced:
            each.error = describe_error(state)  # it cannot be followed that far
        if each.is_running:
            again = _Row(index, each, each._state_after(num_forced))
            _find_masks([again], masks)
            if again.state.is_error():
                each._recover(again.state)


def _find_masks(rows: list[_Row], masks: np.ndarray, *, is_ahead: bool = False) -> None:
    """Has llguidance write the masks of matchers, each into its row of `masks`, and charges them for the time.

    Where they take one thread longer than `PARALLEL_S`, several find what is left. `is_ahead`: nobody waits for them
    yet, so several find all.
    """
    threads = rows[0].matcher._threads if len(rows) > 1 else None
    if threads is None:
        _find_alone(masks, rows)
        return
    slow, left = ([row for row in rows if row.matcher._is_slow is is_slow] for is_slow in (True, False))
    if slow:
        of_lexers = groupby(sorted(slow, key=_lexer_of), key=_lexer_of)
        begin = time.monotonic()
        list(threads.timing.map(partial(_find_alone, masks), [list(group) for _, group in of_lexers]))
        took_s, total_s = time.monotonic() - begin, sum([row.matcher._mask_s for row in slow])
        for row in slow:
            row.matcher._wait_s *= min(1.0, took_s / max(total_s, 1e-9))
    if not is_ahead and sum(row.matcher._mask_s for row in left) <= PARALLEL_S:
        left = _find_alone(masks, left, PARALLEL_S)
    if len(left) > 1:
        _find_together(left, masks, threads)
    else:
        _find_alone(masks, left)


def _find_alone(masks: np.ndarray, rows: list[_Row], limit_s: float = math.inf) -> list[_Row]:
    """One call for each mask, which is charged for its own time. Returns the rows that are left after `limit_s`."""
    total_s, address, size = 0.0, masks.ctypes.data, masks.strides[0]
    for number, (index, matcher, state) in enumerate(rows):
        if total_s > limit_s:
            return rows[number:]
        begin = time.thread_time()
        state.unsafe_compute_mask_ptr(address + index * size, size)
        took_s = time.thread_time() - begin
        total_s += took_s
        matcher._charge(took_s)
    return []


def _lexer_of(row: _Row) -> int:
    return id(row.matcher._start)


def _find_together(rows: list[_Row], masks: np.ndarray, threads: MaskThreads) -> None:
    """One call for many masks, whose own times stay unknown. If it takes too long, each is timed in the next step."""
    expected_s = sum(row.matcher._mask_s for row in rows) / threads.num_threads
    # Each thread begins with a part of the list, so those that share a lexer stand together.
    states = [(row.state, row.index) for row in sorted(rows, key=_lexer_of)]
    begin = time.monotonic()
    threads.executor.unsafe_compute_mask_ptr(states, masks.ctypes.data, masks.strides[0], len(masks))
    took_s = time.monotonic() - begin
    mask_s = took_s * threads.num_threads / len(rows)
    is_slow = mask_s > TOKEN_S or took_s > max(TOKEN_S, 2 * expected_s)
    for row in rows:
        row.matcher._mask_s, row.matcher._wait_s, row.matcher._is_slow = mask_s, took_s / len(rows), is_slow


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
