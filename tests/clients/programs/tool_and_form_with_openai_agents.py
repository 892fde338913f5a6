"""The `openai-agents` package: agents with a tool and an output type, over chats and responses. See test_agents.py."""

from __future__ import annotations

import asyncio
import json
import sys

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

[base_url] = sys.argv[1:]
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=base_url, api_key="none needed", max_retries=0, timeout=60)
called = []


class Report(BaseModel):
    """What the agent has to answer."""

    summary: str


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city"""
    called.append(city)
    return "sunny"


async def reports() -> list[list[str]]:
    """Of each API: the report of a whole answer, and that of a streamed one."""
    found = []
    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(name="weather", tools=[get_weather], output_type=Report, model=model("model", client))
        whole = await Runner.run(agent, "How is the weather in Paris?")
        streamed = Runner.run_streamed(agent, "How is the weather in Rome?")
        async for _ in streamed.stream_events():
            pass
        found.append([result.final_output_as(Report).summary for result in (whole, streamed)])
    return found


json.dump({"reports": asyncio.run(reports()), "called": called}, sys.stdout)
