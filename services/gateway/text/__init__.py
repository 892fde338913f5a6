"""From what clients send to the text and tokens of a prompt."""
