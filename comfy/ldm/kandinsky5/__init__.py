"""The network of Kandinsky 5."""
