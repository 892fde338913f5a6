"""Forms are tried in a process of their own: every form gets an answer, and the process is there for the next one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.errors import CapacityError, TwostrokeError
from services.common.fairness import Client
from services.common.structured_output import MAX_CHOICES, Constraint, StructuredOutput
from services.gateway.resources import piped_processes
from services.gateway.text import grammar_trials
from services.gateway.text.grammar_trials import GrammarTrials
from services.grammar.grammar_error import GrammarError, SlowGrammarError
from tests.support.process_memory import resident_bytes
from tests.support.running_gateway import until

BUSY, OTHER = (0, 1), (0, 2)
GOOD = StructuredOutput(Constraint.REGEX, "[0-9]+")
MAX_RESIDENT_BYTES = 3 * 2**30


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value))


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(Constraint.REGEX, pattern)


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(Constraint.GRAMMAR, text)


def chain(length: int) -> dict[str, Any]:
    """Each definition names the next one twice."""
    definitions: dict[str, Any] = {f"d{length}": {"type": "string"}}
    for i in range(length):
        reference = {"$ref": f"#/$defs/d{i + 1}"}
        definitions[f"d{i}"] = {"type": "object", "properties": {"x": reference, "y": reference}}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


REFUSED = {
    "a reference to itself": schema({"$ref": "#"}),
    "a cycle of references": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                                    "b": {"$ref": "#/$defs/a"}}}),
    "another document": schema({"$ref": "http://127.0.0.1:9/schema"}),
    "10,000 properties": schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}),
    "alternatives of alternatives": schema({"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"k{i}_{j}": {"const": j}}, "required": [f"k{i}_{j}"]}
        for j in range(4)]} for i in range(12)]}),
    "deep": StructuredOutput(Constraint.JSON_SCHEMA, '{"items":' * 20_000 + "{}" + "}" * 20_000),
    "nothing": schema({"enum": []}),
    "no JSON": StructuredOutput(Constraint.JSON_SCHEMA, "\0"),
    "a surrogate": StructuredOutput(Constraint.REGEX, "\ud800"),
    "a million repetitions": regex("a{1000000}"),
    "repeated repetitions": regex("((a{100}){100}){100}"),
    "deep parentheses": regex("(" * 50_000 + "a" + ")" * 50_000),
    "look-around": regex("(?<=a)b"),
    "an endless text": grammar('start: "a" start'),
    "an empty cycle": grammar("start: start"),
    "deep GBNF": grammar("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep Lark": grammar("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "wide GBNF": grammar("root ::= " + " ".join(f"r{i}" for i in range(5_000)) + "\n"
                         + "\n".join(f'r{i} ::= "x" | r{i * 7 % 5_000}' for i in range(5_000))),
    "an empty grammar": grammar(""),
    "deep formats": StructuredOutput(Constraint.STRUCTURAL_TAG, "[" * 100_000),
}  # fmt: skip
ACCEPTED = {
    "10,000 values": schema({"enum": [f"value {i}" for i in range(10_000)]}),
    "10,000 choices": StructuredOutput(Constraint.CHOICE, choices=tuple(f"c {i}" for i in range(MAX_CHOICES))),
    "a tree": schema({"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {
        "left": {"$ref": "#/$defs/t"}, "right": {"$ref": "#/$defs/t"}}}}}),
    "a chain": schema(chain(100)),
    "catastrophic for others": regex("(a+)+b"),
    "NUL": regex("a\0b"),
    "every character": StructuredOutput(Constraint.CHOICE, choices=('"\\\0\n😀é/#',)),
    "many items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
}  # fmt: skip


def idle_pids(made: GrammarTrials) -> list[int]:
    """Of the process that tries forms, unless it does so now."""
    return [each.pid for each in made._processes.idle]


@asynccontextmanager
async def trials() -> AsyncIterator[GrammarTrials]:
    made = GrammarTrials({"path": str(EMBEDDED_MODEL), "vocab_size": 1024, "eos_token_ids": [2], "is_optional": False})
    try:
        yield made
    finally:
        await made.close()


def run(test: Callable[[GrammarTrials], Awaitable[None]]) -> None:
    async def body() -> None:
        async with trials() as made:
            await test(made)

    asyncio.run(body())


def test_expensive_and_impossible_forms_are_refused_and_the_next_one_is_not() -> None:
    async def test(made: GrammarTrials) -> None:
        for name, form in REFUSED.items():
            with pytest.raises(GrammarError) as refused:
                await made.compile(form)
            assert 0 < len(str(refused.value)) < 500, name
            assert (await made.compile(GOOD)).constraint is Constraint.GRAMMAR, name
            for pid in idle_pids(made):
                assert resident_bytes(pid) < MAX_RESIDENT_BYTES, name

    run(test)


def test_large_and_odd_forms_are_accepted() -> None:
    async def test(made: GrammarTrials) -> None:
        for name, form in ACCEPTED.items():
            compiled = await made.compile(form)
            assert compiled.constraint is Constraint.GRAMMAR, name
            assert await made.compile(compiled) == compiled, "a grammar stays as it is"

    run(test)


def test_a_form_that_needs_too_much_time_ends_the_process_and_not_the_next_form() -> None:
    async def test(made: GrammarTrials) -> None:
        await made.compile(GOOD)
        [pid] = idle_pids(made)
        os.kill(pid, signal.SIGSTOP)  # so that it does not answer before its end
        waiting = asyncio.create_task(made.compile(regex("b+")))
        await until(lambda: not idle_pids(made))
        os.kill(pid, signal.SIGPROF)  # as the limit of CPU time does
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(SlowGrammarError, match="more than 2 s of CPU time"):
            await waiting
        assert await made.compile(regex("c+"))

    run(test)


def test_a_form_that_took_too_long_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: GrammarTrials) -> None:
        answers = iter([{"error": "slow", "is_slow": True}, {"grammar": "g", "num_bytes": 1}])

        async def ask(form: StructuredOutput) -> dict[str, Any]:
            return next(answers)

        monkeypatch.setattr(made, "_ask", ask)
        for _ in range(2):  # the second time by what is kept
            with pytest.raises(SlowGrammarError, match="slow"):
                await made.compile(GOOD)
        monkeypatch.setattr(grammar_trials.time, "monotonic", lambda: expires_at)
        expires_at = made._results[GOOD].expires_at
        assert (await made.compile(GOOD)).text == "g"
        assert made._results[GOOD].expires_at is None and made._num_bytes == GOOD.num_bytes + 1

    run(test)


def test_the_process_ends_itself_when_a_form_needs_more_cpu_time_than_allowed() -> None:
    code = "from services.grammar import trial; trial.MAX_CPU_S = 0.05; trial.main()"
    vocabulary = {"path": str(EMBEDDED_MODEL), "vocab_size": 1024, "eos_token_ids": [2], "is_optional": False}
    forms = [GOOD, REFUSED["repeated repetitions"]]  # the latter takes most of a second
    lines = [{"constraint": form.constraint, "text": form.text, "choices": []} for form in forms]
    command = [sys.executable, "-c", code, json.dumps(vocabulary)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGPROF
    assert [set(json.loads(line)) for line in ended.stdout.splitlines()] == [{"grammar", "num_bytes"}]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_process_that_is_killed_is_no_fault_of_the_form(number: signal.Signals, is_busy: bool) -> None:
    async def test(made: GrammarTrials) -> None:
        await made.compile(GOOD)
        [pid] = idle_pids(made)
        if is_busy:
            os.kill(pid, signal.SIGSTOP)
        else:
            os.kill(pid, number)
        waiting = asyncio.create_task(made.compile(regex("b+")))
        if is_busy:
            await until(lambda: not idle_pids(made))
            for each in (number, signal.SIGCONT):
                os.kill(pid, each)
        assert (await waiting).constraint is Constraint.GRAMMAR
        assert idle_pids(made) != [pid]

    run(test)


def test_a_form_whose_process_is_always_killed_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: GrammarTrials) -> None:
        await made.compile(GOOD)
        [pid] = idle_pids(made)
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(made.compile(regex("b+")))
        await until(lambda: not idle_pids(made))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(CapacityError, match="killed 1 times"):
            await waiting
        assert await made.compile(regex("b+"))

    monkeypatch.setattr(piped_processes, "MAX_KILLS", 1)
    run(test)


def test_a_process_that_cannot_start_is_no_fault_of_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: GrammarTrials) -> None:
        for _ in range(2):
            with pytest.raises(TwostrokeError, match="cannot be tried") as failed:
                await made.compile(GOOD)
            assert not isinstance(failed.value, GrammarError)

    monkeypatch.setattr(grammar_trials, "_MODULE", "services.grammar.missing")
    run(test)


def test_results_are_kept_by_value() -> None:
    async def test(made: GrammarTrials) -> None:
        first = await made.compile(GOOD)
        with pytest.raises(GrammarError) as refused:
            await made.compile(regex("("))
        await made.close()
        assert await made.compile(StructuredOutput(Constraint.REGEX, "[0-9]+")) is first
        with pytest.raises(GrammarError) as again:
            await made.compile(regex("("))
        assert str(again.value) == str(refused.value) and not idle_pids(made)

    run(test)


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: GrammarTrials) -> None:
        for i in range(8):
            await made.compile(regex(f"a{{{i}}}b"))
        assert len(made._results) == 4 and made._num_bytes < 4 * 200
        monkeypatch.setattr(grammar_trials, "MAX_KEPT_BYTES", 0)
        await made.compile(GOOD)
        assert not made._results and made._num_bytes == 0

    monkeypatch.setattr(grammar_trials, "MAX_KEPT", 4)
    run(test)


def test_one_trial_serves_all_who_wait_for_the_form_whoever_gives_up() -> None:
    async def test(made: GrammarTrials) -> None:
        tasks = [asyncio.create_task(made.compile(GOOD)) for _ in range(5)]
        await asyncio.sleep(0)
        assert len(made._running) == 1
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert len({id(each) for each in results[1:]}) == 1 and isinstance(results[1], StructuredOutput)

    run(test)


def test_hundreds_of_forms_of_a_client_wait_and_none_that_it_gives_up_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks send them: a form of its own in each of a thousand requests."""
    asked: list[StructuredOutput] = []
    may_answer = asyncio.Event()

    async def ask(made: GrammarTrials, form: StructuredOutput) -> dict[str, Any]:
        asked.append(form)
        await may_answer.wait()
        return {"grammar": form.text, "num_bytes": 1}

    async def test(made: GrammarTrials) -> None:
        forms = [regex(f"x{i}") for i in range(1000)]
        tasks = [asyncio.create_task(made.compile(each, BUSY)) for each in forms]
        await until(lambda: len(made._running) == 1000 and bool(asked))
        for task in tasks[:10] + tasks[500:]:  # the first one has begun, and its result is kept
            task.cancel()
        again = asyncio.create_task(made.compile(forms[999], BUSY))  # of another request
        await asyncio.sleep(0)
        may_answer.set()
        found = await asyncio.gather(*tasks[10:500], again)
        assert [each.text for each in found] == [each.text for each in forms[10:500] + forms[999:]]
        assert asked == forms[:1] + forms[10:500] + forms[999:] and not made._running
        assert (await made.compile(forms[0])).text == "x0" and len(asked) == 492

    monkeypatch.setattr(GrammarTrials, "_ask", ask)
    run(test)


def test_a_form_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: GrammarTrials) -> None:
        first = asyncio.create_task(made.compile(GOOD, BUSY))  # starts the process
        await until(lambda: any(each.has_begun for each in made._running.values()))
        with pytest.raises(CapacityError, match=r"the form of structured output has waited 0\.01 s for its turn"):
            await made.compile(regex("x"), BUSY)
        assert await first

    monkeypatch.setattr(grammar_trials, "MAX_WAIT_S", 0.01)
    run(test)


def test_clients_take_turns_with_their_forms() -> None:
    async def test(made: GrammarTrials) -> None:
        order: list[str] = []

        async def compile_(name: str, pattern: str, client: Client) -> None:
            await made.compile(regex(pattern), client)
            order.append(name)

        asked = [(f"busy {i}", f"x{i}", BUSY) for i in range(8)]
        asked += [("other 0", "y0", OTHER), ("other 1", "y1", OTHER), ("third", "z", (1, 1))]
        await asyncio.gather(*(compile_(*each) for each in asked))
        # By tenant first: the third client has a tenant of its own.
        assert order[:6] == ["busy 0", "busy 1", "third", "other 0", "busy 2", "other 1"]
        assert order[6:] == [f"busy {i}" for i in range(3, 8)]

    run(test)


def test_a_form_that_two_clients_wait_for_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StructuredOutput] = []
    ask = GrammarTrials._ask

    async def counted(made: GrammarTrials, form: StructuredOutput) -> dict[str, str]:
        asked.append(form)
        return await ask(made, form)

    async def test(made: GrammarTrials) -> None:
        first, second = await asyncio.gather(made.compile(GOOD, BUSY), made.compile(GOOD, OTHER))
        assert first is second and asked == [GOOD]

    monkeypatch.setattr(GrammarTrials, "_ask", counted)
    run(test)
