"""`autogen-ext` with `autogen-agentchat`: the client, an agent, and two agents in turn. See test_clients.py."""

from __future__ import annotations

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import CreateResult, ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
ABILITIES = {
    "vision": False,
    "function_calling": False,
    "json_output": False,
    "structured_output": False,
    "family": ModelFamily.UNKNOWN,
}


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=base_url,
        api_key="none needed",
        model_info=ABILITIES,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
    )
    messages = [UserMessage(content=question, source="somebody")]
    whole = await client.create(messages)
    streamed = [piece async for piece in client.create_stream(messages, include_usage=True)]
    assert isinstance(streamed[-1], CreateResult)
    agent = AssistantAgent("first", client, system_message=None)
    answer = await agent.run(task=question)
    team = [AssistantAgent(name, client, system_message=None) for name in ("first", "second")]
    talk = await RoundRobinGroupChat(team, termination_condition=MaxMessageTermination(3)).run(task=question)
    await client.close()
    usage = streamed[-1].usage
    got = {
        "chat": whole.content,
        "chat_pieces": streamed[:-1],
        "chat_usage": [usage.prompt_tokens, usage.completion_tokens],
        "several": [answer.messages[-1].content, talk.messages[1].content],
        "speakers": [message.source for message in talk.messages],
    }
    json.dump(got, sys.stdout)


asyncio.run(main())
