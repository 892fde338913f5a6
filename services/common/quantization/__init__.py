"""How a checkpoint's weights are quantized, read from its config files. No tensors here."""
