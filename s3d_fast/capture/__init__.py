"""From a model and data to splitting operators: one batch, all batches, memory budgets, several processes."""
