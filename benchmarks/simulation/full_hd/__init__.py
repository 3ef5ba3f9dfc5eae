"""Timings of full-HD screenshots, from floating-point operations."""
