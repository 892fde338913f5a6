"""The `anthropic` package: messages whole and streamed, tokens counted, models, errors. See test_clients.py."""

from __future__ import annotations

import json
import sys

import anthropic

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none needed", max_retries=0, timeout=60)
messages = [{"role": "user", "content": question}]
limits = {"model": model, "max_tokens": max_tokens, "extra_body": {"temperature": 0}}

chat = client.messages.create(messages=messages, metadata={"user_id": "somebody"}, **limits)
with client.messages.stream(messages=messages, **limits) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
assert (final.content[0].text, final.stop_reason) == (chat.content[0].text, chat.stop_reason)
try:
    client.messages.create(messages=[{"role": "user", "content": too_long}], **limits)
    overflow = "none"
except anthropic.BadRequestError as error:
    overflow = error.body["error"]["type"]
json.dump(
    {
        "models": [each.id for each in client.models.list()],
        "count": client.messages.count_tokens(model=model, messages=messages).input_tokens,
        "chat": chat.content[0].text,
        "chat_pieces": pieces,
        "chat_usage": [final.usage.input_tokens + final.usage.cache_read_input_tokens, final.usage.output_tokens],
        "overflow": overflow,
    },
    sys.stdout,
)
