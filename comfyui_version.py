"""The version of the interface that custom nodes rely on, under the name they import."""

__version__ = "0.8.0"
