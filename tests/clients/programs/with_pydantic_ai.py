"""`pydantic-ai`: an agent, whole and streamed, and how it reports a prompt that is too long. See test_clients.py."""

from __future__ import annotations

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]


async def main() -> None:
    provider = OpenAIProvider(base_url=base_url, api_key="none needed")
    settings = {"max_tokens": max_tokens, "temperature": 0.0}
    agent = Agent(OpenAIChatModel(model, provider=provider), model_settings=settings, retries=0)
    whole = await agent.run(question)
    async with agent.run_stream(question) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        usage = stream.usage
    try:
        await agent.run(too_long)
        overflow = "none"
    except ModelHTTPError as error:
        overflow = error.body["code"]
    usage = usage() if callable(usage) else usage
    got = {
        "chat": whole.output,
        "chat_pieces": pieces,
        "chat_usage": [usage.input_tokens, usage.output_tokens],
        "overflow": overflow,
    }
    json.dump(got, sys.stdout)


asyncio.run(main())
