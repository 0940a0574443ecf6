"""The networks of Stable Cascade."""
