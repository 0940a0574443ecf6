"""T2I adapters: small convolutional networks from a picture to features added to a UNet."""
