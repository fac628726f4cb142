"""Names of vLLM for what the rest of the room does not have: refused, taken, or to be read."""
