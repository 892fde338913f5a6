"""The `openai` package: completions, chats and responses, log-probabilities, models, errors. See test_clients.py."""

from __future__ import annotations

import json
import sys

import openai

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
client = openai.OpenAI(base_url=base_url, api_key="none needed", max_retries=0, timeout=60)
limits = {"model": model, "max_tokens": max_tokens, "temperature": 0}
messages = [{"role": "user", "content": question}]

whole = client.completions.create(prompt=prompt, **limits)
streamed = list(client.completions.create(prompt=prompt, stream=True, **limits))
chat = client.chat.completions.create(messages=messages, store=False, metadata={"a": "b"}, user="somebody", **limits)
with client.chat.completions.stream(messages=messages, stream_options={"include_usage": True}, **limits) as stream:
    deltas = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion()
answer = {"model": model, "input": question, "max_output_tokens": max_tokens, "temperature": 0}
response = client.responses.create(store=False, **answer)
with client.responses.stream(**answer) as events:
    response_deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final_response = events.get_final_response()
several = client.chat.completions.create(messages=messages, n=2, logprobs=True, top_logprobs=2, **limits)
try:
    client.chat.completions.create(messages=[{"role": "user", "content": too_long}], **limits)
    overflow = "none"
except openai.BadRequestError as error:
    overflow = str(error.code)
json.dump(
    {
        "models": [each.id for each in client.models.list()],
        "completion": whole.choices[0].text,
        "completion_pieces": [chunk.choices[0].text for chunk in streamed],
        "completion_usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "chat": chat.choices[0].message.content,
        "chat_pieces": deltas,
        "chat_usage": [final.usage.prompt_tokens, final.usage.completion_tokens],
        "response": response.output_text,
        "response_pieces": response_deltas,
        "response_usage": [final_response.usage.input_tokens, final_response.usage.output_tokens],
        "several": [choice.message.content for choice in several.choices],
        "from_logprobs": "".join(each.token for each in several.choices[0].logprobs.content),
        "overflow": overflow,
    },
    sys.stdout,
)
