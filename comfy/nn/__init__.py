"""Blocks that several networks share: attention back ends, embeddings, norms, patchify."""
