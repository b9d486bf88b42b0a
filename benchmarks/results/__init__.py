"""The experiments of docs/results.md: `python -m benchmarks.results` lists, runs and presents them.

An experiment is a module with an `Experiment`: its runs, a function that performs one of them and returns a record,
and functions that make the tables and figures of the page from the records. `EXPERIMENTS` has them all.
"""
