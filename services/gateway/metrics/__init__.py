"""What the gateway measures of itself and of the workers."""
