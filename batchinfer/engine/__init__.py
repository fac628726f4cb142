"""Control plane: requests, sequences, blocks and steps. No torch, no text, no files.

``engine`` runs one step at a time: ``scheduler`` says what it computes, ``step_io`` makes arrays of
that and takes the result back, ``kv`` has the blocks. ``simulate`` runs the same without computing.
"""
