"""How the demo checkpoint is made: painted pictures, networks, training, export, a judge."""
