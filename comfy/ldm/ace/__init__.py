"""The networks of ACE-Step."""
