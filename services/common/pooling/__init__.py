"""How a checkpoint makes one vector of a whole input."""
