"""What only some sequences have, a folder for each: nothing of it is in the engine, which moves rows."""
