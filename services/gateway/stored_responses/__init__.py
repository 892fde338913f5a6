"""Answers of the Responses API that are kept, so that a later request can continue them."""
