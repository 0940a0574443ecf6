"""The encoder of T5 and UMT5."""
