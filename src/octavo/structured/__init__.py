"""Outputs held to a form: JSON schemas, regular expressions, choices and grammars, by llguidance."""
