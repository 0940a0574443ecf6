"""Training of LoRAs and other adapters on a loaded model."""
