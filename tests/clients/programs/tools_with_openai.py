"""The `openai` package: a demanded call, whole and by its streaming helper. See test_client_tools.py."""

from __future__ import annotations

import json
import sys

import openai

base_url, model, question, tool = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="none needed", max_retries=0, timeout=60)
given = {
    "model": model,
    "messages": [{"role": "user", "content": question}],
    "tools": [json.loads(tool)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 300,
}
whole = client.chat.completions.create(**given).choices[0]
with client.chat.completions.stream(**given) as stream:
    streamed = stream.get_final_completion().choices[0]
json.dump(
    {
        "calls": [
            [call.function.name, json.loads(call.function.arguments)]
            for choice in (whole, streamed)
            for call in choice.message.tool_calls
        ],
        "reasons": [whole.finish_reason, streamed.finish_reason],
    },
    sys.stdout,
)
