"""Control plane: requests, sequences, blocks and steps. No torch, no text, no files.

``engine`` runs one step at a time: ``scheduler`` chooses what to compute, ``step_io`` builds its
arrays and processes its result, ``kv`` manages blocks. ``simulate`` runs the engine without
computing anything.
"""
