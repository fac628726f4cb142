"""Text plane: templates, tokenizing, detokenizing, stop strings. No torch, no files.

May import: config, cpus, errors, near_names, protocols.
"""
