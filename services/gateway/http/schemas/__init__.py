"""What goes in and out over HTTP: pydantic models in, typed dictionaries out, both in the OpenAPI document."""
