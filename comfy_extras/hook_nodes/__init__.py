"""The hook nodes: conditioning with hooks, hooks, and their schedules."""
