"""Linear layers packed for a CPU, and what multiplies: measured, chosen, kept to.

May import: errors, console, kernels, worker.
"""
