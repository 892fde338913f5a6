"""The `anthropic` package with tools and thinking: a conversation of two turns. See test_anthropic.py."""

from __future__ import annotations

import json
import sys

import anthropic

[base_url] = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key="a-secret-key-0123456789", max_retries=0, timeout=60)
weather = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
messages: list = [{"role": "user", "content": "How is the weather in Paris?"}]
options = {"model": "model", "max_tokens": 500, "system": system, "tools": [weather]}

whole = client.messages.create(messages=messages, **options)
with client.messages.stream(messages=messages, **options) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_message()
[call] = [block for block in streamed.content if block.type == "tool_use"]
messages += [
    {"role": "assistant", "content": streamed.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
]
last = client.messages.create(messages=messages, **options)
errors = []
for key, model in (("a-secret-key-0123456789", "claude"), ("wrong", "model")):
    try:
        client.with_options(api_key=key).messages.create(messages=messages, **options | {"model": model})
    except anthropic.APIStatusError as error:
        errors.append([type(error).__name__, error.body["error"]["type"], bool(error.request_id)])
json.dump(
    {
        "whole": [[block.type, getattr(block, "input", None)] for block in whole.content],
        "streamed": [[block.type, getattr(block, "input", None)] for block in streamed.content],
        "stop_reasons": [whole.stop_reason, streamed.stop_reason, last.stop_reason],
        "thinking": [block.thinking for block in streamed.content if block.type == "thinking"],
        "has_json_events": "input_json" in kinds,
        "last": "".join(block.text for block in last.content if block.type == "text"),
        "errors": errors,
    },
    sys.stdout,
)
