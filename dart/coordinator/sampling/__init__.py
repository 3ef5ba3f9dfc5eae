"""Where trajectories come from and go to: episodes, the data manager, evaluation, collection, demonstrations."""
