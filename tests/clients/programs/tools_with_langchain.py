"""`langchain-openai`: a model with bound tools, invoked and streamed. See test_client_tools.py."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI

base_url, model, question, tool = sys.argv[1:]
chat = ChatOpenAI(base_url=base_url, api_key="none needed", model=model, max_tokens=300, temperature=0, max_retries=0)
bound = chat.bind_tools([json.loads(tool)], tool_choice="required", parallel_tool_calls=False)
whole = bound.invoke(question)
chunks = list(bound.stream(question))
streamed = chunks[0]
for chunk in chunks[1:]:
    streamed += chunk
json.dump(
    {
        "calls": [[call["name"], call["args"]] for message in (whole, streamed) for call in message.tool_calls],
        "reasons": [message.response_metadata["finish_reason"] for message in (whole, streamed)],
    },
    sys.stdout,
)
