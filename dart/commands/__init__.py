"""One module per command of the command line; `dart.cli` imports them when they run."""
