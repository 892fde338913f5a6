"""llama.cpp's own routes."""
