"""The encoder of BERT."""
