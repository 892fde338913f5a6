"""Vectors in prompts: how the dense worker receives, keeps and reads the tables that they are in."""
