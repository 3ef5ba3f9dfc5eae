"""Adaptive data curation (DART, arXiv 2509.23866): what is sampled, for how long, and what is trained on."""
