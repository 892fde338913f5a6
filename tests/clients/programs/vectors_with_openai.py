"""Embeddings by the `openai` package, as JSON. Arguments: base URL, model, texts. See test_vector_clients.py."""

from __future__ import annotations

import json
import sys

from openai import OpenAI

base_url, model, *texts = sys.argv[1:]
answer = OpenAI(base_url=base_url, api_key="none").embeddings.create(model=model, input=texts)
json.dump({"vectors": [each.embedding for each in answer.data]}, sys.stdout)
