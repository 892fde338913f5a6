"""Triton's inference protocol (KServe v2): five models that stand for the parts of a TensorRT-LLM model repository."""
