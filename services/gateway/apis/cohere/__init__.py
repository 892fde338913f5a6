"""Cohere's POST /v2/chat. Its vectors and ranks are with the others."""
