"""A model as a small graph of operations: their schema, the builder, rewriting passes and a float64 reference."""
