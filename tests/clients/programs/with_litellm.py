"""`litellm`: completions, chat, streamed and not, and the error that its router falls back on. See test_clients.py."""

from __future__ import annotations

import json
import sys

import litellm

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
limits = {"api_base": base_url, "api_key": "none needed", "max_tokens": max_tokens, "temperature": 0, "max_retries": 0}
messages = [{"role": "user", "content": question}]

whole = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=prompt, **limits)
chat = litellm.completion(model=f"openai/{model}", messages=messages, user="somebody", **limits)
chunks = list(
    litellm.completion(
        model=f"openai/{model}", messages=messages, stream=True, stream_options={"include_usage": True}, **limits
    )
)
rebuilt = litellm.stream_chunk_builder(chunks)
try:
    litellm.completion(model=f"openai/{model}", messages=[{"role": "user", "content": too_long}], **limits)
    overflow = "none"
except litellm.exceptions.ContextWindowExceededError as error:
    overflow = type(error).__name__
json.dump(
    {
        "completion": whole.choices[0].text,
        "completion_usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "chat": chat.choices[0].message.content,
        "chat_pieces": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "chat_usage": [rebuilt.usage.prompt_tokens, rebuilt.usage.completion_tokens],
        "overflow": overflow,
    },
    sys.stdout,
)
