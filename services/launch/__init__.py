"""The supervisor: `python -m services.launch` starts, watches, replaces and stops the services of one machine."""
