"""`litellm`: a demanded call, whole and put together from a stream. See test_client_tools.py."""

from __future__ import annotations

import json
import sys

import litellm

base_url, model, question, tool = sys.argv[1:]
given = {
    "model": f"openai/{model}",
    "messages": [{"role": "user", "content": question}],
    "tools": [json.loads(tool)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "api_base": base_url,
    "api_key": "none needed",
    "max_tokens": 300,
    "temperature": 0,
    "max_retries": 0,
}
whole = litellm.completion(**given).choices[0]
streamed = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **given))).choices[0]
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
