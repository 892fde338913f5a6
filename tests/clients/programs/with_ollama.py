"""`ollama` and LangChain's `ChatOllama`: texts, chats, the list of models, and the error for long prompts."""

from __future__ import annotations

import json
import sys

import ollama
from langchain_ollama import ChatOllama

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
host = base_url.removesuffix("/v1")
options = {"temperature": 0, "num_predict": max_tokens}
messages = [{"role": "user", "content": question}]
client = ollama.Client(host)

completion = client.generate(model, prompt, raw=True, options=options)
completion_pieces = [each.response for each in client.generate(model, prompt, raw=True, stream=True, options=options)]
chat = client.chat(model, messages, options=options)
chat_pieces = [each.message.content for each in client.chat(model, messages, stream=True, options=options)]
llm = ChatOllama(base_url=host, model=f"{model}:latest", temperature=0, num_predict=max_tokens)
templated = client.generate(model, question, options=options)
try:
    client.generate(model, too_long)
    overflow = "none"
except ollama.ResponseError as error:
    overflow = f"{error.status_code}"
json.dump(
    {
        "completion": completion.response,
        "completion_usage": [completion.prompt_eval_count, completion.eval_count],
        "completion_pieces": completion_pieces,
        "chat": chat.message.content,
        "chat_usage": [chat.prompt_eval_count, chat.eval_count],
        "chat_pieces": chat_pieces,
        "several": [
            templated.response,
            llm.invoke(question).content,
            "".join(chunk.content for chunk in llm.stream(question)),
        ],
        "models": [each.model for each in client.list().models],
        "overflow": overflow,
    },
    sys.stdout,
)
