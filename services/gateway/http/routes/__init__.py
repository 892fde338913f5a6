"""The routes, one module per group; `services.gateway.http.app` combines them."""
