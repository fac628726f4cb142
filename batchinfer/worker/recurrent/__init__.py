"""Recurrent layers of hybrid models, whose state lies in slots of the KV pool."""
