"""The JSON files of a model's directory: how they are read, and how their fields are checked."""
