"""Records, configuration, errors and clock that every layer shares. Imports nothing of ours."""
