"""Embeddings by the `cohere` package, of its older API, as JSON. Arguments: base URL, model, texts."""

from __future__ import annotations

import json
import sys

import cohere

base_url, model, *texts = sys.argv[1:]
client = cohere.Client("none", base_url=base_url.removesuffix("/v1"))
answer = client.embed(model=model, texts=texts, input_type="search_document")
json.dump({"vectors": answer.embeddings}, sys.stdout)
