"""Encoders of models whose decoders have cross attention: their parts, and how they are built."""
