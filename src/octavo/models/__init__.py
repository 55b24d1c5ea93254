"""One file per architecture: a function from a config to a graph."""
