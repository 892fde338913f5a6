"""Ollama's routes: /api/chat, /api/generate, and what they tell of the model. Those of vectors are with the others."""
