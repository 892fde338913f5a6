"""Triton's inference protocol (KServe's version 2), over HTTP and gRPC."""
