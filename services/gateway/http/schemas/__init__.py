"""The bodies of HTTP requests (pydantic models) and answers (typed dictionaries), also for the OpenAPI document."""
