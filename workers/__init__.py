"""Workers: the parts that need a GPU, a browser or a desktop. Imported as `dart.workers`."""
