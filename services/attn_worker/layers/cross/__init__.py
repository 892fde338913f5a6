"""Cross attention: layers whose keys and values are those of an encoder's output, written once."""
