"""Decisions about workers: which takes a request, which is updated next, which is trusted."""
