"""What ships with dart: models, and the page of the world `ladder`."""
