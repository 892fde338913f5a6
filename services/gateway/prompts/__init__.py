"""Prompts with vectors: how they are read and checked."""
