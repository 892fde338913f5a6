"""The model families that are served: for each, how its config.json is read. One family, or a few alike, per file."""
