"""Structured output: from what a client asks for to the tokens that may come next. By llguidance.

The gateway lowers it to the one kind of grammar that llguidance reads, and tries it in a process of its own; the
dense worker makes a matcher of it for each sequence. The gateway itself never imports llguidance.
"""
