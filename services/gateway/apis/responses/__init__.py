"""OpenAI's Responses, with those that are stored."""
