"""Small public helpers that node packs import by name."""
