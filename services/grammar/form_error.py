"""`FormError`: a form of structured output that cannot be used."""

from __future__ import annotations


class FormError(ValueError):
    """Says what is wrong with the form, in words for the client."""
