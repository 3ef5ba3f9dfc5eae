"""Where trajectories come from and go: episodes, the data manager, evaluation, collection, demonstrations."""
