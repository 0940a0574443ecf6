"""Networks that listen: sounds in, the states of each of their layers out."""
