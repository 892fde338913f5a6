"""The front of the server: public API, tokenizer, and the journal of open requests. One event loop."""

__version__ = "0.1.0"
