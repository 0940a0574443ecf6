"""State-dict files, key remapping, LoRA layouts, adapters and weight arithmetic."""
