"""One file per schema version. A step uses no code of dart's: that may change, and the step must not."""
