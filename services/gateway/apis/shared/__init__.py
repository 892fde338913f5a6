"""What several dialects share. No dialect imports another."""
