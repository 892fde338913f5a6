"""The `anthropic` package with a picture: whole, streamed, in a tool's result, its tokens counted, and refused.

See test_anthropic.py.
"""

from __future__ import annotations

import json
import sys

import anthropic

base_url, data = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key="none needed", max_retries=0, timeout=60)
picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]}]
options = {"model": "model", "messages": messages}
whole = client.messages.create(max_tokens=12, extra_body={"temperature": 0}, **options)
with client.messages.stream(max_tokens=12, extra_body={"temperature": 0}, **options) as stream:
    streamed = "".join(stream.text_stream)
    usage = stream.get_final_message().usage
use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "Seen:"}, picture]}
chat = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [use]},
    {"role": "user", "content": [result]},
]
shown = client.messages.create(model="model", max_tokens=12, extra_body={"temperature": 0}, messages=chat)
broken = picture | {"source": picture["source"] | {"data": "AAAA"}}
try:
    client.messages.create(model="model", max_tokens=1, messages=[{"role": "user", "content": [broken]}])
    error = "none"
except anthropic.BadRequestError as refused:
    error = refused.body["error"]["message"]
json.dump(
    {
        "whole": whole.content[0].text,
        "streamed": streamed,
        "input_tokens": [
            client.messages.count_tokens(**options).input_tokens,
            *(each.input_tokens + (each.cache_read_input_tokens or 0) for each in (whole.usage, usage)),
        ],
        "shown": [shown.content[0].text, shown.usage.input_tokens],
        "error": error,
    },
    sys.stdout,
)
