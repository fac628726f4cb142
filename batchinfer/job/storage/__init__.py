"""Accesses files on this machine, in object stores and on the Hugging Face Hub, and locks
outputs.
"""
