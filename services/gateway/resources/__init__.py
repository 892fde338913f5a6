"""What all open requests share: memory, heavy work, open files."""
