"""Pictures in prompts: how the dense worker receives them, and the rows of steps that a tower computes of them."""
