"""What every room needs: demands on arguments, tables, whole files, byte counts, random states, processes, batches."""
