"""Text Generation Inference's own routes: /generate, /generate_stream and its form of /."""
