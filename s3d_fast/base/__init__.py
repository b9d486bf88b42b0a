"""Shared helpers: argument checks, text tables, atomic files, byte counts, random states, processes, batches."""
