"""Runs the recurrent layers of hybrid models, whose states are in slots of the KV pool."""
