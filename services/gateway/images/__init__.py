"""Pictures in requests: where they come from, how they are decoded, and which tokens of a prompt stand for them."""
