"""What custom nodes ask about the optional device allocator of other servers: it is not used."""

aimdo_enabled = False
"""Whether an allocator below torch moves weights; residency is decided in `comfy.patching`."""
