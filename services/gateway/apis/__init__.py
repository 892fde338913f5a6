"""The dialects in which clients speak to the gateway, each in a folder of its own."""
