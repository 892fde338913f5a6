"""`beta.messages.tool_runner` of the `anthropic` package: it asks for a thread first. See test_anthropic.py."""

from __future__ import annotations

import json
import sys

import anthropic

[base_url] = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key="none needed", max_retries=0, timeout=60)
called = []


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather of a city

    Args:
        city: its name
    """
    called.append(city)
    return "sunny"


texts = []
for is_stream in (False, True):
    runner = client.beta.messages.tool_runner(
        model="model",
        max_tokens=500,
        tools=[get_weather],
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        stream=is_stream,
    )
    last = runner.until_done()
    texts.append(["".join(block.text for block in last.content if block.type == "text"), last.stop_reason])
json.dump({"called": called, "texts": texts}, sys.stdout)
