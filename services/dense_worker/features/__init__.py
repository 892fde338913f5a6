"""What only some sequences have, a folder for each: nothing of it is in the engine, which moves rows.

A folder has a `Feature` (`feature.py`), which says which sequences have it and what they have of it
(`sequence_feature.py`), and what a step does for them (`step_part.py`). A new one is a line in `installed.py`.
"""
