"""Routes about the server: health, models, metrics, adapters, and the page to try it."""
