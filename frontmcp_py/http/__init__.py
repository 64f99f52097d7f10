"""Serving over HTTP: the probe that says the process lives, and the runner."""
