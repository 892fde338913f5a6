"""Several lanes: steps in flight beside each other, so that both workers compute at the same time."""
