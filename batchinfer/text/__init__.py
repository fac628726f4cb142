"""Text plane: templates, tokenizing, detokenizing, stop strings. No torch, no files."""
