"""Models that see a whole input at once and keep nothing of it: encoders of text, of images and of sound."""
