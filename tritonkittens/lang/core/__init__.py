"""What every part of the language is built on: the tracer's backend, records, errors, dtypes, resource budgets."""
