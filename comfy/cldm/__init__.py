"""Public names of ControlNets."""
