"""Linear layers packed or quantised, and what multiplies: measured, chosen, kept to.

May import: errors, console, kernels, engine.kv, worker.
"""
