"""The OpenAI API over HTTP: a FastAPI application on uvicorn, in the gateway's event loop."""
