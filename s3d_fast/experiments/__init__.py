"""Experiments that are not recipes: they train many tiny networks at once."""
