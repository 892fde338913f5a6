"""Frameworks that give a request tools and a form at once: openai-agents, and instructor with its calls of tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from services.common.config import EMBEDDED_MODEL
from tests.clients.environments import Environment
from tests.clients.test_clients import PROGRAMS, needs, run
from tests.support.chats.chat_models import make_chat_model, prompt_text, writes
from tests.support.cluster import free_port, running_cluster
from tests.support.running_gateway import run as run_test
from tests.support.running_gateway import running_gateway
from tests.support.workers.fake_dense import FakeDense

GROUP = "openai-agents"
CITIES = ["Paris", "Rome"] * 2  # of a whole and a streamed answer, over each of the APIs


def call_of(city: str) -> str:
    return f'<tool_call>\n{json.dumps({"name": "get_weather", "arguments": {"city": city}})}\n</tool_call>'


@needs(GROUP)
def test_an_agent_calls_its_tool_and_then_answers_with_its_output_type(tmp_path: Path) -> None:
    summaries = [f"Sunny in {city}: {number}." for number, city in enumerate(CITIES)]
    answers = [
        text
        for city, summary in zip(CITIES, summaries, strict=True)
        for text in (call_of(city), json.dumps({"summary": summary}))
    ]
    dense = FakeDense(writes(*answers), max_model_len=8192)

    async def test() -> None:
        model = make_chat_model(tmp_path / "model", "hermes")
        address = f"127.0.0.1:{free_port()}"
        async with running_gateway(tmp_path, dense, http_address=address, model=model):
            python = Environment(GROUP).program("python")
            command = [python, str(PROGRAMS / "tool_and_form_with_openai_agents.py"), f"http://{address}/v1"]
            got = json.loads(await asyncio.to_thread(run, command))
        assert got == {"reports": [summaries[:2], summaries[2:]], "called": CITIES}

    run_test(test())
    assert len(dense.submits) == len(answers)
    for submit in dense.submits:  # the model may call or answer in the form, and has to do one of the two
        assert submit.spec.sampling.HasField("structured_output")
    for submit in dense.submits[1::2]:
        assert "<tool_response>\nsunny\n</tool_response>" in prompt_text(submit)


@needs(GROUP)
def test_instructor_gets_its_object_from_a_model_that_a_grammar_makes_call(tmp_path: Path) -> None:
    settings = (f"gateway.http_address=127.0.0.1:{free_port()}", "gateway.tool_parser=hermes")
    with running_cluster(tmp_path, *settings) as cluster:
        command = [Environment(GROUP).program("python"), str(PROGRAMS / "form_with_instructor.py")]
        got = json.loads(run([*command, f"http://{cluster.http_address}/v1", EMBEDDED_MODEL.name, "A trip to Paris?"]))
    assert len(got) == 2  # over chats and over responses
    for trip in got:
        assert trip.keys() == {"city", "days"} and trip["city"] in CITIES and 1 <= trip["days"] <= 9
