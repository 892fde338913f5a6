"""A tower's parts as ONNX graphs, and run by TensorRT."""
