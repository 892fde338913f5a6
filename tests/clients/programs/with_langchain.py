"""`langchain-openai`: both model classes, a chain, a batch, named messages, and its error for long prompts."""

from __future__ import annotations

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

base_url, model, prompt, question, max_tokens, too_long = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
limits = {
    "base_url": base_url,
    "api_key": "none needed",
    "model": model,
    "max_tokens": max_tokens,
    "temperature": 0,
    "max_retries": 0,
}
llm, chat_model = OpenAI(**limits), ChatOpenAI(stream_usage=True, **limits)

result = llm.generate([prompt])
usage = result.llm_output["token_usage"]
chat = chat_model.invoke([HumanMessage(question, name="somebody")])
chunks = list(chat_model.stream(question))
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat_model | StrOutputParser()
try:
    chat_model.invoke(too_long)
    overflow = "none"
except ContextOverflowError:
    overflow = ContextOverflowError.__name__
json.dump(
    {
        "completion": result.generations[0][0].text,
        "completion_pieces": list(llm.stream(prompt)),
        "completion_usage": [usage["prompt_tokens"], usage["completion_tokens"]],
        "chat": chat.content,
        "chat_pieces": [chunk.content for chunk in chunks],
        "chat_usage": [total.usage_metadata["input_tokens"], total.usage_metadata["output_tokens"]],
        "several": chain.batch([{"question": question}] * 3),
        "overflow": overflow,
    },
    sys.stdout,
)
