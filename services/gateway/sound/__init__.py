"""Sound that clients upload: decoding, features, and what a speech model writes of it."""
