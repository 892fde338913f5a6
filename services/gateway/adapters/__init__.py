"""The adapters that clients may use."""
