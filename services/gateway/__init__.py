"""The front of the server: public API, tokenizer, and the journal of open requests. One event loop."""

from services import VERSION as __version__  # noqa: F401  the gateway's name for it
