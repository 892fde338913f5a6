"""Embeddings, scores, ranks and classes over HTTP, as OpenAI, Cohere, Jina and vLLM have them."""
