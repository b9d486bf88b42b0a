"""Experiments that are not recipes: the paper's toy problem trains many tiny networks at once."""
