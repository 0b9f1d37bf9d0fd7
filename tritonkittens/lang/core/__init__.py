"""The base of the language: the tracer's backend, records, errors, dtypes, resource budgets."""
