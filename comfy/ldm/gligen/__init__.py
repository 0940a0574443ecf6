"""GLIGEN: objects named by texts, placed in boxes."""
