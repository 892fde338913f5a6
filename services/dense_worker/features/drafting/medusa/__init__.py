"""Medusa heads, which draft the tokens after the next one from the model's last hidden state (arXiv:2401.10774)."""
