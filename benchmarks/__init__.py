"""Benchmarks by pytest-benchmark; each checks that its result is right before it times it."""
