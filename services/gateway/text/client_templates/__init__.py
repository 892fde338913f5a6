"""Chat templates that clients send with their requests."""
