"""Embeddings by `ollama` and by LangChain's class for it, as JSON. Arguments: base URL, model, texts."""

from __future__ import annotations

import json
import sys

import ollama
from langchain_ollama import OllamaEmbeddings

base_url, model, *texts = sys.argv[1:]
host = base_url.removesuffix("/v1")
vectors = [list(each) for each in ollama.Client(host).embed(model, texts).embeddings]
json.dump({"vectors": vectors, "query": OllamaEmbeddings(base_url=host, model=model).embed_query(texts[0])}, sys.stdout)
