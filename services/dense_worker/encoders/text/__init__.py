"""Encoders of text, such as BERT: the models, and a dense worker that serves one alone."""
