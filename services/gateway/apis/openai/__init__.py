"""OpenAI's completions and chats, with the fields and routes that vLLM adds to them."""
