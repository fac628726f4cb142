"""Text plane: templates, tokenizing, detokenizing, stop strings. No torch, no files.

May import: config, process, errors, near_names, protocols.
"""
