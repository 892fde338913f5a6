"""Requests that outlive their connections: a client that comes back gets the rest of its answer."""
