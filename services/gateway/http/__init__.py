"""HTTP itself, for all dialects: the server, the checks around every request, JSON, errors, the OpenAPI document."""
