"""EAGLE-3: one layer that drafts tokens from the served model's residuals and the last token (arXiv:2503.01840)."""
