"""Optional built-in nodes, one feature per module. The table of modules is in `modules.py`."""
