"""The keys and values of what drafts on the device, and attention to them."""
