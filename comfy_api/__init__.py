"""The interface for authors of nodes, in numbered versions and as `latest`.

Declarations load without torch; what handles media imports torch, PIL or av when it is used.
"""
