"""A process that tries grammars for the gateway: `python -m services.grammar.trial VOCABULARY`.

It lowers and compiles a grammar and takes a few random walks through it. Whatever that does to time, memory or the
stack, it does to this process alone: the limits below end it, and the gateway starts another one. Time is that of
the CPU, but beside other processes the same work takes longer; answers that depend on it say so (`is_slow`).

VOCABULARY is JSON, the arguments of `read_vocabulary`. Standard input has one structured output per line, as JSON, and
each line of the answer is for one of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.grammar_error import GrammarError, SlowGrammarError
from services.grammar.lower import locate, lower
from services.grammar.matcher import compile_grammar, describe_error
from services.grammar.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CPU_S = 2.0  # for one grammar; others wait meanwhile
MAX_MEMORY_BYTES = 3 * 2**30  # of address space
STACK_BYTES = 2**20  # what fits here fits the stacks of the dense worker's threads, which are larger
NICENESS = 5  # streams come first
MAX_MASK_S = 0.05  # CPU time to find the tokens that may come next
NUM_WALKS = 3
NUM_STEPS = 16  # tokens of a walk
NUM_ATTEMPTS = 3  # at a walk that is too slow: an interrupt or a cold cache can make a single step slow

_COUNTS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of mallinfo(3)
_NOT_EMPTY = re.compile(rb"[^\0]", re.DOTALL)


class Tried(NamedTuple):
    """A grammar that can be used."""

    grammar: str
    num_bytes: int  # that it takes when it is compiled and a few outputs have followed it


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint) for name in _COUNTS.split())


def main() -> None:
    """Serves until standard input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when this process ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads the answer if the gateway has died
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    arguments = json.loads(sys.argv[1])
    try:
        vocabulary = read_vocabulary(**{**arguments, "path": Path(arguments["path"])})
        tokenizer = vocabulary.load()
    except GrammarError as error:
        for _ in sys.stdin:
            _answer(error=str(error))
        return
    for line in sys.stdin:
        # Ends the process with SIGPROF. Unlike RLIMIT_CPU it counts fractions of a second, so each has the same.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            tried = try_grammar(tokenizer, vocabulary, read_form(json.loads(line)))
            _answer(grammar=tried.grammar, num_bytes=tried.num_bytes)
        except GrammarError as error:
            _answer(error=str(error), origin=error.origin, is_slow=isinstance(error, SlowGrammarError))
        except (ValueError, RecursionError, MemoryError) as error:
            _answer(error=str(error) or type(error).__name__)


def read_form(message: dict[str, Any]) -> StructuredOutput:
    """The grammar of a message."""
    return StructuredOutput(Constraint(message["constraint"]), message["text"], tuple(message["choices"]))


def try_grammar(tokenizer: LLTokenizer, vocabulary: Vocabulary, structure: StructuredOutput) -> Tried:
    """The grammar of a grammar, tried. Raises `GrammarError`."""
    grammar = lower(structure, vocabulary.special_tokens)
    before = _allocated_bytes()
    try:
        start = compile_grammar(tokenizer, grammar)
    except GrammarError as error:
        raise locate(error, structure, vocabulary.special_tokens) from error
    for walk in range(NUM_WALKS):
        _try_walk(start, walk)
    return Tried(grammar, max(0, _allocated_bytes() - before))


def _allocated_bytes() -> int:
    """What this process has allocated by malloc, as llguidance does, less than the 4 GiB that mallinfo counts."""
    libc = ctypes.CDLL(None)
    libc.mallinfo.restype = _MallocInfo
    found = libc.mallinfo()
    return (found.uordblks + found.hblkhd) % 2**32


def _try_walk(start: LLMatcher, walk: int) -> None:
    """Raises `SlowGrammarError` only if each attempt at the same walk was too slow."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            _walk(start.deep_copy(), random.Random(walk))
        except SlowGrammarError:
            if attempt == NUM_ATTEMPTS:
                raise
        else:
            return


def _walk(matcher: LLMatcher, generator: random.Random) -> None:
    num_forced = 0  # of the next tokens, which are looked up again when these have been followed
    for step in range(NUM_STEPS):
        begin = time.thread_time()
        num_forced = num_forced - 1 if num_forced else len(matcher.compute_ff_tokens())
        mask = matcher.compute_bitmask()
        token_id = None if matcher.is_error() else _random_token(mask, generator)
        if token_id is not None:
            matcher.consume_token(token_id)
        took_s = time.thread_time() - begin
        if matcher.is_error() or token_id is None:
            reason = describe_error(matcher) or "no token of the vocabulary fits the form"
            raise GrammarError(f"{reason} (after {step} tokens of an output)")
        if took_s > MAX_MASK_S:
            raise SlowGrammarError(
                f"it takes {1e3 * took_s:.0f} ms to find the tokens that may follow {step} tokens of an output, "
                f"at most {1e3 * MAX_MASK_S:.0f} ms allowed"
            )
        if matcher.is_stopped():
            return


def _random_token(mask: bytes, generator: random.Random) -> int | None:
    """One of the tokens of the mask; None if there are none."""
    found = _NOT_EMPTY.search(mask, generator.randrange(len(mask))) or _NOT_EMPTY.search(mask)
    if found is None:
        return None
    bits = [bit for bit in range(8) if found[0][0] >> bit & 1]
    return 8 * found.start() + generator.choice(bits)


def _answer(**values: str | int | None) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
