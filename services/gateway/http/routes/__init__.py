"""The paths, one file a group; `services.gateway.http.app` puts them together."""
