"""Twostroke: its services, which are released together."""

VERSION = "0.1.0"
