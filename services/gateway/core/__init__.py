"""What the gateway does for every API: start requests, follow their tokens, end them."""
