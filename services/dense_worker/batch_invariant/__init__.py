"""The dense stroke with `dense.deterministic`: the bits of a row do not depend on the other rows of a step."""
