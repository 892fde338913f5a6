"""`mistralai`: chats, whole and streamed, a call that it demands, and the list of models."""

from __future__ import annotations

import json
import sys

from mistralai.client import Mistral
from mistralai.client.errors import SDKError

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
client = Mistral(api_key="none needed", server_url=base_url.removesuffix("/v1"))
options = {"model": model, "max_tokens": max_tokens, "temperature": 0}
messages = [{"role": "user", "content": question}]
schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}

chat = client.chat.complete(messages=messages, **options)
chunks = [event.data for event in client.chat.stream(messages=messages, **options)]
called = client.chat.complete(
    model=model, messages=messages, tools=[tool], tool_choice="any", max_tokens=100, temperature=0
)
try:
    client.chat.complete(messages=[{"role": "user", "content": too_long}], **options)
    overflow = "none"
except SDKError as error:
    overflow = json.loads(error.body)["error"]["code"]
json.dump(
    {
        "chat": chat.choices[0].message.content,
        "chat_pieces": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "chat_usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
        "models": [each.id for each in client.models.list().data],
        "called": [call.function.name for call in called.choices[0].message.tool_calls],
        "overflow": overflow,
    },
    sys.stdout,
)
