"""Embeddings and ranks by LiteLLM, as JSON. Arguments: base URL, model, texts. See test_vector_clients.py."""

from __future__ import annotations

import json
import sys

import litellm

base_url, model, *texts = sys.argv[1:]
answer = litellm.embedding(f"openai/{model}", input=texts, api_base=base_url, api_key="none", encoding_format="float")
# It speaks to vLLM's /rerank under the name of that server.
ranked = litellm.rerank(
    f"hosted_vllm/{model}", query=texts[0], documents=texts[1:], api_base=base_url.removesuffix("/v1"), api_key="none"
)
ranks = [[each["index"], each["relevance_score"]] for each in ranked.results]
json.dump({"vectors": [each["embedding"] for each in answer.data], "ranks": ranks}, sys.stdout)
