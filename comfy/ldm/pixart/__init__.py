"""PixArt."""
