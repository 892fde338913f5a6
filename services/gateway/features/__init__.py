"""What requests ask for beyond text and sampling, and what answers report of their tokens: a feature in each file."""
