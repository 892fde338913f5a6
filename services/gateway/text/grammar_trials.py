"""`GrammarTrials`: tries the grammars of structured output before their requests run, in a process of its own.

Event loop and engine never meet a grammar that explodes: the process has limits of CPU time, memory and stack, and is
started again after a grammar has ended it. It starts with the first grammar. It tries one at a time; the clients whose
grammars wait take turns, and one that nobody waits for any more is not tried. Results are kept by value; that a grammar
took too long is kept for a minute only, because on a less busy machine it may take less.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.common.errors import TwostrokeError
from services.common.fairness import Client, ClientTurns
from services.common.structured_output import Constraint, StructuredOutput
from services.gateway.resources.piped_processes import PipedProcesses, close_process, end_of, write_and_read
from services.grammar.grammar_error import GrammarError, SlowGrammarError
from services.grammar.trial import MAX_CPU_S

MAX_WAIT_S = 600.0  # for a turn. A trial takes milliseconds, and `MAX_CPU_S` at most; `Admission` bounds how many wait
MAX_KEPT = 1024  # results
MAX_KEPT_BYTES = 32 * 2**20  # of structured outputs and their grammars
SLOW_KEPT_S = 60.0  # how long a grammar that took too long is not tried again
TIMEOUT_S = 90.0  # for one grammar and a start of the process; far above what they take, for a busy machine
_MAX_LINE_BYTES = 8 * 2**20
_MODULE = "services.grammar.trial"


@dataclass(frozen=True, slots=True)
class _Kept:
    result: StructuredOutput | GrammarError
    expires_at: float | None  # on the monotonic clock; None: never

    @property
    def is_valid(self) -> bool:
        return self.expires_at is None or time.monotonic() < self.expires_at


@dataclass(eq=False, slots=True)
class _Trial:
    task: asyncio.Task[StructuredOutput] = field(init=False)
    num_waiting: int = 0  # requests
    has_begun: bool = False


class GrammarTrials:
    """Runs in the event loop. `close` ends the process."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        """`vocabulary`: the arguments of `read_vocabulary`, as JSON has them."""
        self._results: OrderedDict[StructuredOutput, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[tuple[Client, StructuredOutput], _Trial] = {}
        self._turns = ClientTurns(1, MAX_WAIT_S, "the form of structured output")
        self._processes = PipedProcesses(_MODULE, json.dumps(vocabulary), task="tries forms")

    async def compile(self, structure: StructuredOutput, client: Client = (0, 0)) -> StructuredOutput:
        """The same as a grammar that dense workers can use.

        Raises `GrammarError` if it cannot be used, and `CapacityError` if it takes too long here.
        """
        known = self._known(structure)
        if known is not None:
            return known
        trial = self._running.get((client, structure))
        if trial is None:
            trial = self._running[client, structure] = _Trial()
            trial.task = asyncio.create_task(self._try(trial, structure, client))
            trial.task.add_done_callback(lambda _: self._forget(trial, structure, client))
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.task)  # others may wait for it, too
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting and not trial.has_begun:
                trial.task.cancel()
                self._forget(trial, structure, client)  # who comes now starts another one

    async def close(self) -> None:
        """Ends the process and all trials."""
        for trial in list(self._running.values()):
            trial.task.cancel()
        await self._processes.close()

    def _known(self, structure: StructuredOutput) -> StructuredOutput | None:
        """The kept result; None if there is none. Raises `GrammarError` if it is an error."""
        known = self._results.get(structure)
        if known is None or not known.is_valid:
            return None
        self._results.move_to_end(structure)
        if isinstance(known.result, GrammarError):
            raise type(known.result)(str(known.result), known.result.origin)
        return known.result

    def _forget(self, trial: _Trial, structure: StructuredOutput, client: Client) -> None:
        if self._running.get((client, structure)) is trial:
            del self._running[client, structure]
        if trial.task.done() and not trial.task.cancelled():
            trial.task.exception()  # who waited for it has it; perhaps nobody does any more

    async def _try(self, trial: _Trial, structure: StructuredOutput, client: Client) -> StructuredOutput:
        async with self._turns.turn(client):
            trial.has_begun = True
            known = self._known(structure)  # another client may have had the same grammar tried
            return known if known is not None else await self._try_now(structure)

    async def _try_now(self, structure: StructuredOutput) -> StructuredOutput:
        answer = await self._ask(structure)
        if "error" in answer:
            kind = SlowGrammarError if answer.get("is_slow") else GrammarError
            error = kind(answer["error"], answer.get("origin"))
            self._keep(structure, error)
            raise error
        compiled = StructuredOutput(Constraint.GRAMMAR, answer["grammar"], compiled_bytes=answer["num_bytes"])
        self._keep(structure, compiled)
        return compiled

    async def _ask(self, structure: StructuredOutput) -> dict[str, Any]:
        message = {"constraint": structure.constraint, "text": structure.text, "choices": structure.choices}
        exchange = partial(_exchange, message=json.dumps(message).encode() + b"\n")
        return await self._processes.run(exchange, TIMEOUT_S, "the form has not been compiled")

    def _keep(self, structure: StructuredOutput, result: StructuredOutput | GrammarError) -> None:
        if (earlier := self._results.pop(structure, None)) is not None:
            self._num_bytes -= _num_bytes(structure, earlier)
        expires_at = time.monotonic() + SLOW_KEPT_S if isinstance(result, SlowGrammarError) else None
        kept = self._results[structure] = _Kept(result, expires_at)
        self._num_bytes += _num_bytes(structure, kept)
        while len(self._results) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            self._num_bytes -= _num_bytes(*self._results.popitem(last=False))


def _exchange(process: subprocess.Popen[bytes], message: bytes) -> dict[str, Any]:
    """The process's answer; an error in its stead if the grammar has ended the process. On a thread."""
    line = write_and_read(process, _MAX_LINE_BYTES, message)
    if line.endswith(b"\n"):
        return json.loads(line)
    if len(line) == _MAX_LINE_BYTES:
        process.kill()
        close_process(process)
        return {"error": f"its grammar has more than {_MAX_LINE_BYTES} bytes"}
    status = end_of(process, "tries forms")
    if status >= 0:
        raise TwostrokeError("forms of structured output cannot be tried: see the gateway's log")
    if status == -signal.SIGPROF:
        return {"error": f"it takes more than {MAX_CPU_S:g} s of CPU time to compile, the limit", "is_slow": True}
    return {"error": "it is too large or nested too deeply to compile"}


def _num_bytes(structure: StructuredOutput, kept: _Kept) -> int:
    result = kept.result
    return structure.num_bytes + (len(str(result)) if isinstance(result, GrammarError) else result.num_bytes)
