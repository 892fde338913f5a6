"""OpenAI's routes of speech: transcriptions and translations."""
