"""Routes about the server: health, load, metrics, adapters, and the page to try it."""
