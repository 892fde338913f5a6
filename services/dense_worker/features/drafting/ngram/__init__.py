"""Drafts that copy text: of the sequence itself, and of earlier answers to the same client."""
