"""Embeddings by LangChain, as JSON. Arguments: base URL, model, texts. See test_vector_clients.py.

It counts tokens with OpenAI's tokenizer unless it is told not to.
"""

from __future__ import annotations

import json
import sys

from langchain_openai import OpenAIEmbeddings

base_url, model, *texts = sys.argv[1:]
embeddings = OpenAIEmbeddings(base_url=base_url, api_key="none", model=model, check_embedding_ctx_length=False)
json.dump({"vectors": embeddings.embed_documents(texts), "query": embeddings.embed_query(texts[0])}, sys.stdout)
