"""Growth inside other libraries: trainers and loggers. None of them is needed to import this package."""
