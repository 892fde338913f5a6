"""Embeddings by Haystack, as JSON. Arguments: base URL, model, texts. See test_vector_clients.py."""

from __future__ import annotations

import json
import sys

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret

base_url, model, *texts = sys.argv[1:]
own = {"api_key": Secret.from_token("none"), "model": model, "api_base_url": base_url}
documents = OpenAIDocumentEmbedder(**own, progress_bar=False).run([Document(content=text) for text in texts])
query = OpenAITextEmbedder(**own).run(texts[0])["embedding"]
json.dump({"vectors": [each.embedding for each in documents["documents"]], "query": query}, sys.stdout)
