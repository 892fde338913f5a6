"""Draft tokens, which a step verifies: `Drafting` decides when and how many, a `Drafter` says which."""
