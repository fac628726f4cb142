"""Text processing: chat templates, tokenizing, detokenizing, stop strings. Imports no torch."""
