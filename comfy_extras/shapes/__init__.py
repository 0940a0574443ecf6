"""Shapes in three dimensions: surfaces of occupied space, and files for them."""
