"""Recurrent layers, which keep states of sequences: gated delta, Mamba 1 and 2, short convolutions."""
