"""`cohere`: chats, whole and streamed, and its error for long prompts."""

from __future__ import annotations

import json
import sys

import cohere

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
client = cohere.ClientV2("none needed", base_url=base_url.removesuffix("/v1"))
options = {"model": model, "max_tokens": max_tokens, "temperature": 0}
messages = [{"role": "user", "content": question}]

chat = client.chat(messages=messages, **options)
events = list(client.chat_stream(messages=messages, **options))
usage = events[-1].delta.usage
try:
    client.chat(messages=[{"role": "user", "content": too_long}], **options)
    overflow = "none"
except cohere.BadRequestError as error:
    overflow = type(error).__name__
json.dump(
    {
        "chat": chat.message.content[0].text,
        "chat_pieces": [each.delta.message.content.text for each in events if each.type == "content-delta"],
        "chat_usage": [int(usage.tokens.input_tokens), int(usage.tokens.output_tokens)],
        "models": [each.name for each in client.models.list().models],
        "overflow": overflow,
    },
    sys.stdout,
)
