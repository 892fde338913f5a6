"""Ranks by the `cohere` package, both of its APIs, as JSON. Arguments: base URL, model, texts."""

from __future__ import annotations

import json
import sys

import cohere

base_url, model, query, *documents = sys.argv[1:]
root = base_url.removesuffix("/v1")
found = [
    client.rerank(model=model, query=query, documents=documents)
    for client in (cohere.Client("none", base_url=root), cohere.ClientV2("none", base_url=root))
]
ranks = [[[each.index, each.relevance_score] for each in answer.results] for answer in found]
json.dump({"ranks": ranks[0], "ranks_of_v2": ranks[1]}, sys.stdout)
