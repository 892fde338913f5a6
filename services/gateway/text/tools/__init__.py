"""Tools: what a client defines, and parsers that find calls of tools in an answer, one file for each format."""
