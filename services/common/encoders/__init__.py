"""Models that see whole inputs at once and generate nothing: what their config.json says."""
