"""What a client asks for, read and checked."""
