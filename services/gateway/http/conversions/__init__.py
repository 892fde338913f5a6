"""Converts the bodies of other APIs than chat completions to gRPC messages, one module per API."""
