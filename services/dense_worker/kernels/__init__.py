"""What layers are computed with: in each room the formula in torch, which is the reference, beside Triton kernels."""
