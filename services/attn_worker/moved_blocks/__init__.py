"""Blocks of a sequence that moves: the attention worker that it leaves sends them, the other one receives them."""
